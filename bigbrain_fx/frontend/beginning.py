"""Entry point of every child process with torch; it reports where torch cannot be loaded.

    python -P -m bigbrain_fx.frontend.beginning bigbrain_fx.bundles.onnx_export.child:onnx '{...}'

The module is then run as if it had been called alone, with the remaining arguments. The module may
import torch, and the name after the colon, at its top.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.service import memory_error, require_torch


def main() -> None:
    """Load torch, then run the module that the first word names."""
    module, _, libraries = sys.argv.pop(1).partition(":")
    message = _why_not(tuple(filter(None, libraries.split(","))))
    if message:
        print(message, flush=True)
        sys.exit(2)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _why_not(libraries: tuple[str, ...]) -> str:
    """Return the message for the launcher of this process; "" where all is there.

    Output of libraries as they are loaded is no message: it goes to the output of faults.
    """
    messages = os.dup(1)
    os.dup2(2, 1)
    try:
        require_torch(*libraries)
    except Exception as error:
        known = error if isinstance(error, BigBrainError) else memory_error(error)
        if known is None:
            raise
        return json.dumps({"error": known.fields})
    finally:
        os.dup2(messages, 1)
        os.close(messages)
    return ""


if __name__ == "__main__":
    main()
