"""Folders of work that is under way: each goes with its command, or with a later one of the user.

A command that is killed cannot remove its folder. It holds a lock on it, which ends with the
process. A command that makes a folder first removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = "bigbrain-scratch"


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder that is there as long as this process needs it; used as a TemporaryDirectory.

    Args:
        what: a word for its name, for who looks into the folder of temporary files.
    """

    def __init__(self, what: str) -> None:
        _sweep(tempfile.gettempdir())
        self._held: int | None = None
        while self._held is None:  # another command's sweep may be faster than the lock
            super().__init__(prefix=f"{_here()}-{what}-")
            self._held = _hold(self.name)
            if self._held is None:
                super().cleanup()

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def is_scratch(path: Path) -> bool:
    """Whether a path lies in a folder of `Scratch`, which goes with its process."""
    place = Path(tempfile.gettempdir()).resolve()
    own = path.resolve()
    folders = own.relative_to(place).parts if own.is_relative_to(place) else ()
    return any(folder.startswith(f"{PREFIX}-") for folder in folders[:1])


def _here() -> str:
    """Return how the names of this host's begin: others that see the folder hold other locks."""
    return f"{PREFIX}-{re.sub('[^A-Za-z0-9]', '', os.uname().nodename)}"


def _hold(folder: str) -> int | None:
    """Return a descriptor that holds a folder; None: it is gone."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: no sweep can have it either
        fcntl.flock(file, fcntl.LOCK_EX)
    if _is(folder, file):
        return file
    os.close(file)
    return None


def _is(folder: str, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(folder), os.fstat(file))
    except FileNotFoundError:
        return False


@cache
def _sweep(place: str) -> None:
    """Remove what commands have left that were killed; once in a process."""
    with suppress(OSError):  # no sweep is worth an end
        names = [entry.name for entry in os.scandir(place) if entry.name.startswith(f"{_here()}-")]
        for name in names:
            with _unheld(os.path.join(place, name)) as folder:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _unheld(folder: str) -> Iterator[str | None]:
    """Hold a folder of this user that no process holds; None: it is none."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, a link, or of a user who lets nobody look
        yield None
        return
    try:
        yield folder if _is_free(file) and _is(folder, file) else None
    finally:
        os.close(file)


def _is_free(file: int) -> bool:
    if os.fstat(file).st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
