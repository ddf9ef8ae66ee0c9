"""Files and folders that others may read as the user's umask says: libraries make them private.

`tempfile` and safetensors' writer give 0600 and 0700 whatever the umask: another user, or a
container, could not read a bundle. This file knows no tensors.
"""

from __future__ import annotations

import os
import stat
from itertools import count
from pathlib import Path


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
