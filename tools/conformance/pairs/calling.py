"""The command line, called in this process; what it says when it refuses."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping

from bigbrain_fx.cli import main

REFUSALS = (2, 3)


def called(*words: str) -> tuple[int, str]:
    """Run a command; return its exit code, and what it wrote on stderr."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, said.getvalue()


def refusal(code: int, text: str) -> Mapping[str, str]:
    """Say what was refused and what to do instead, or that it was no refusal."""
    error = re.search(r"^error(?:\[BX\w+\])?: (.*)", text, re.MULTILINE)
    if code not in REFUSALS or error is None:
        return {"status": "crash", "detail": text[-2000:]}
    advice = re.search(r"^ *help: (.*)", text, re.MULTILINE | re.DOTALL)
    return {"status": "refused", "detail": error[1], "help": advice[1].strip() if advice else ""}
