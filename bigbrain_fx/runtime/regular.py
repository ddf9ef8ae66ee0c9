"""Regular files only, and JSON as it was written: a name may lead to a pipe, which waits for ever.

This file is stdlib only and writes nothing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any


def require_regular(path: Path) -> None:
    """Refuse what is no file with bytes in it: a pipe, a socket, a device, a folder.

    Raises:
        OSError: it is not there, or no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file; see `require_regular`.

    It is opened without waiting: the name may have come to lead elsewhere since it was looked at.

    Raises:
        OSError: as there.
    """
    require_regular(path)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        return file.read()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which its reader would let the last of two entries win in silence.

    Raises:
        ValueError: names an entry that is there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found
