"""The few things that commits do to a disk, each of which may be the last before a crash.

A test replaces `Disk` by one that stops at any of these calls, or loses what was not synced. Read
are regular files only: a name may lead to a pipe, which waits for ever.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from .image import Buffer


class Disk:
    """Files as the operating system has them."""

    def make(self, folder: Path) -> None:
        """Make a folder; one that is there already stays."""
        folder.mkdir(mode=0o755, exist_ok=True)

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        """Write a new file and wait until the disk has it; a link or a file there is an error."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o644), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Put a file in its place in one step; what was there is gone."""
        old.replace(new)

    def keep(self, path: Path) -> Path | None:
        """Give what has a name another beside it, too; return that, or None: nothing is there."""
        kept = path.with_name(f".{path.name}.{os.getpid()}-before.tmp")
        self.remove(kept)
        if not path.is_file():
            return None
        try:
            os.link(path, kept)
        except OSError:  # not every file system has two names of one file
            self.rename(path, kept)
        return kept

    def sync(self, folder: Path) -> None:
        """Wait until the disk has the folder's names."""
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def remove(self, path: Path) -> None:
        """Remove a file or an empty folder, if it is there."""
        with suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def put(self, path: Path, pieces: Iterable[Buffer]) -> None:
        """Write a file so that its name never leads to a part of it.

        Raises:
            OSError: the disk is full, or not ours to write on; nothing is left behind.
        """
        part = self.put_aside(path, pieces)
        try:
            self.rename(part, path)
        except OSError:
            self.remove(part)
            raise
        self.sync(path.parent)

    def put_aside(self, path: Path, pieces: Iterable[Buffer]) -> Path:
        """Write what is to be a file beside its place, for `rename`; return where.

        Raises:
            OSError: as `put`.
        """
        for stale in listed(path.parent, f".{escape(path.name)}.*.tmp"):  # of a process that died
            self.remove(stale)
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.write(part, pieces)
        except OSError:
            self.remove(part)
            raise
        return part


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match, sorted; none where there is no folder.

    `Path.glob` takes a folder that cannot be read for an empty one: commits would seem gone.

    Raises:
        OSError: the folder is there and cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if fnmatchcase(name, pattern)]


LOCK_S = 30.0  # longest wait for another process that has locked a folder; it may be stopped
LOOK_S = 0.02


@contextmanager
def locked(folder: Path, wait_s: float = LOCK_S) -> Iterator[None]:
    """Keep other processes out that lock the same folder; the lock ends with its process.

    Raises:
        OSError: another process has it for too long.
    """
    number = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    try:
        _lock(number, folder / ".lock", wait_s)
        yield
    finally:
        os.close(number)


def _lock(number: int, path: Path, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                why = f"another process has locked it for {wait_s:g} s (`fuser {path}` names it)"
                raise OSError(errno.ETIMEDOUT, why, str(path)) from None
            time.sleep(LOOK_S)


def require_regular(path: Path) -> None:
    """Refuse what is no file with bytes in it: a pipe, a socket, a device, a folder.

    Raises:
        OSError: it is not there, or no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file; see `require_regular`.

    The file is opened without waiting: the name may have come to lead elsewhere since it was
    checked.

    Raises:
        OSError: as there.
    """
    require_regular(path)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        return file.read()
