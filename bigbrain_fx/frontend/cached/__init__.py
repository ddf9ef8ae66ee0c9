"""A model of rows of tokens -> the same model, one position a call, with cached keys and values.

    tokens [rows, T] ──trace──▶ Row ──rewrite──▶ Cached: tokens [B, 1], row [B], position [B]

The form is derived from the trace, tried against the model, and captured like any other module.
This package knows nothing of devices, bundles or servers.
"""
