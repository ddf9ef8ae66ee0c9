"""The words behind train.py or infer.py, kept from the user's code.

A model file may parse a command line of its own at its top. When it was split it found none; were
it to find `--steps` or `--seed` of a run, the run would train something else than was split.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAMS = ("train.py", "infer.py")


def take(folder: Path) -> list[str] | None:
    """Take the words from `sys.argv`, if the program is one of the bundle in this folder."""
    program = Path(sys.argv[0] if sys.argv else "")
    if program.name not in PROGRAMS or program.resolve().parent != folder:
        return None
    words = sys.argv[1:]
    del sys.argv[1:]
    return words


def words() -> list[str]:
    """Return the words of the bundle's program, or those of the program that imported it."""
    return sys.argv[1:] if _TAKEN is None else _TAKEN


_TAKEN = take(Path(__file__).resolve().parents[1])  # as the bundle is imported, before user code is
