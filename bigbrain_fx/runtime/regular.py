"""Regular files only: a name may lead to a pipe, where whoever opens it waits for ever.

This file is stdlib only and writes nothing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
