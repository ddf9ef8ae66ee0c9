"""Files and folders that others may read as the user's umask says: libraries make them private.

`tempfile` and safetensors' writer give 0600 and 0700 whatever the umask: another user, or a
container, could not read a bundle. This file knows no tensors.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from itertools import count
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # of renameat2(2): AT_FDCWD, RENAME_EXCHANGE


def new_folder(place: Path) -> Path:
    """Make a folder beside a place that is to be written, under a name that nobody has.

    Raises:
        OSError: it cannot be made.
    """
    for number in count():
        folder = place.with_name(f".{place.name}-{os.getpid()}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def replace_folder(place: Path, new: Path) -> None:
    """Put a folder in the place of another, which is removed: a kill leaves the old or the new.

    Where the system cannot exchange two names, a kill between two renames leaves the old one beside
    its place, under a name that begins with a dot.

    Raises:
        OSError: it cannot be moved.
    """
    if not place.exists():
        new.rename(place)
    elif _exchanged(place, new):
        shutil.rmtree(new)
    else:
        old = new_folder(place)
        place.rename(old)
        new.rename(place)
        shutil.rmtree(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step; false where that is not known (no Linux, some NFS)."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return call is not None and call(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, or one in the place of another: whole or not at all, and no link is followed.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.write(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def as_umask_says(*paths: Path) -> None:
    """Give files of one folder the mode that a new file there has."""
    if not paths:
        return
    probe = paths[0].with_name(f".mode-{os.getpid()}")
    probe.touch()
    try:
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()
    for path in paths:
        path.chmod(mode)
