"""Files and folders beside those they replace: as the umask says, and none left by who was killed.

`tempfile` and safetensors' writer give 0600 and 0700 whatever the umask: another user, or a
container, could not read a bundle. What a killed process leaves is removed by who writes the same
place next: its name says of which system and process it is. This file knows no tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # of renameat2(2): AT_FDCWD, RENAME_EXCHANGE
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"


def new_folder(place: Path) -> Path:
    """Make a folder beside a place that is to be written, under a name that nobody has.

    Raises:
        OSError: it cannot be made.
    """
    for folder in _beside(place):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


@contextlib.contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """Give a new folder beside a place, for as long as it is needed.

    Raises:
        OSError: it cannot be made.
    """
    folder = new_folder(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(place: Path) -> Iterator[Path]:
    """Yield names of this process beside a place; first remove what dead ones have left there."""
    before = f".{place.name}-{_system()}-"
    for path in _left(place.parent, before):
        _remove(path)
    yield from (place.with_name(f"{before}{os.getpid()}-{number}") for number in count())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # it stays, as it did
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _left(folder: Path, before: str) -> Iterator[Path]:
    """Yield what processes of this system that are no more have left in a folder."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            pid, _, number = name.removeprefix(before).partition("-")
            ours = name.startswith(before) and pid.isdecimal() and number.isdecimal()
            if ours and not _lives(int(pid)):
                yield folder / name


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@cache
def _system() -> str:
    """Return what tells apart whose process numbers mean one and the same process.

    A disk may be shared with other hosts or containers, or have files of before the last boot.
    Their processes are unknown here, and their files stay.
    """
    try:
        known = _BOOT.read_text(encoding="utf-8") + os.readlink(_PROCESSES)
    except OSError:
        known = str(uuid.uuid4())  # no Linux: nobody else has it
    return hashlib.sha256(known.encode()).hexdigest()[:8]


def replace_folder(place: Path, new: Path) -> None:
    """Put a folder in the place of another, which is removed: a kill leaves the old or the new.

    Where the system cannot exchange two names, a kill between two renames leaves the old folder
    beside its place. Its name begins with a dot.

    Raises:
        OSError: it cannot be moved.
    """
    if not place.exists():
        new.rename(place)
    elif _exchanged(place, new):
        shutil.rmtree(new)
    else:
        old = new_folder(place.with_name(f"{place.name}.old"))  # nobody removes the only one
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
    for beside in _beside(path):
        with contextlib.suppress(FileExistsError):
            file = beside.open("xb")
            break
    try:
        with file:
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
