"""The beginning of `child`, before torch is imported: where it cannot be, its error is an answer.

Run as `python -m bigbrain_fx.verification.beginning '{"bundle": ...}'`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import memory_error, require_torch


def main() -> None:
    """Verify as asked on the command line; or write why that cannot begin."""
    answer = Path(json.loads(sys.argv[-1])["answer"])
    try:
        require_torch()
        child = importlib.import_module("bigbrain_fx.verification.child")
    except Exception as error:
        known = error if isinstance(error, InputError) else memory_error(error)
        if known is None:
            raise
        answer.write_text(json.dumps({"error": known.fields}), encoding="utf-8")
        return
    child.main()


if __name__ == "__main__":
    main()
    os._exit(0)  # a model file may leave threads behind
