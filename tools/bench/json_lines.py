"""Rows in a file, a line of JSON each, added one by one: a killed run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bigbrain_fx.errors import InputError

R = TypeVar("R")


def read_lines(path: Path, tool: str, row_of: Callable[[Any], R]) -> list[R]:
    """Read the rows of a file; none where there is no file. A line that was cut off is left out.

    Args:
        path: the file.
        tool: whose rows they are.
        row_of: makes a row of a line's content; raises for what is none.

    Raises:
        InputError: a whole line is no row.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_text().split("\n")
    return [_row(path, tool, n, line, row_of) for n, line in enumerate(lines, 1) if line]


def _row(path: Path, tool: str, number: int, line: str, row_of: Callable[[Any], R]) -> R:
    try:
        return row_of(json.loads(line))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"not a row of {tool}: {error}",
            at=f"{path}:{number}",
            help="give another file with --out, or remove that line",
        ) from error


def append_line(path: Path, content: object) -> None:
    """Add a row; what a killed run left of a line is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(content).encode() + b"\n")
