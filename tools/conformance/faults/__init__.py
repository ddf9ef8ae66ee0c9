"""Faults on purpose: runs of a small bundle in which processes die, hang, or find broken files.

`python -m tools.conformance faults` runs them. Runtime and supervisor know nothing of this folder:
a fault is a file that is put into a copy of the bundle.
"""
