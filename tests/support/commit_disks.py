"""Small commits, and disks that crash: at any call, and with what was not synced lost.

This file needs no torch and no pytest.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bigbrain_fx.runtime.checkpoint_format import BrokenError, Record, Say, about_of
from bigbrain_fx.runtime.checkpoint_store import (
    CheckpointStore,
    Loaded,
    first_loadable,
)
from bigbrain_fx.runtime.disk import Disk
from bigbrain_fx.runtime.image import Buffer, TensorEntry, layout_of

ABOUT = {"plan": "p1", "graph": "g1", "torch": "2.13.0"}
FACTS = {**ABOUT, "seed": 0, "micro_batches": 4}
DEVICES = ("d0", "d1")


def image(step: int, device: str) -> bytes:
    """Make a small image: three tensors whose bytes tell step and device."""
    entries = [TensorEntry("parameter:a", "F32", (64,)), TensorEntry("parameter:b", "F32", (8,))]
    entries.append(TensorEntry("buffer:n", "I64", ()))
    layout = layout_of(entries, {**FACTS, "step": step})
    data = bytearray(layout.size)
    data[: len(layout.head)] = layout.head
    for place, entry in enumerate(layout.entries.values()):
        data[entry.start : entry.end] = bytes([1 + step % 50 + place + int(device[1])]) * entry.size
    return bytes(data)


def commit(folder: Path, step: int, generation: int, disk: Disk | None = None) -> Record:
    """Write a whole commit and remove older ones."""
    store = CheckpointStore(folder, disk or QuickDisk())
    parts = {d: store.write_part(d, image(step, d), generation) for d in DEVICES}
    record = store.commit(parts, generation, about_of(FACTS))
    store.prune(generation)
    return record


def with_two_commits(folder: Path) -> int:
    """Commit steps 10 and 20; return the generation."""
    folder.mkdir()
    generation = CheckpointStore(folder, QuickDisk()).begin_generation()
    commit(folder, 10, generation)
    commit(folder, 20, generation)
    return generation


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the commits of a folder, newest first."""
    return [record.step for record in CheckpointStore(folder).records()]


class QuickDisk(Disk):
    """A disk that is never waited for."""

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        path.write_bytes(b"".join(bytes(piece) for piece in pieces))

    def sync(self, folder: Path) -> None:
        pass


class CrashError(BaseException):
    """The machine stopped here: nothing is tidied up."""


class CrashingDisk(Disk):
    """Stop at the n-th call; `lose` then takes back what no sync has made sure of.

    A write that is cut off leaves half of its bytes.
    """

    def __init__(self, at: int = 10**9) -> None:
        self.at = at
        self.calls = 0
        self.undo: list[tuple[Path, Callable[[], None]]] = []

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.stop()

    def stop(self) -> None:
        raise CrashError

    def make(self, folder: Path) -> None:
        self._count()
        if not folder.exists():
            self.undo.append((folder.parent, lambda: shutil.rmtree(folder, ignore_errors=True)))
        super().make(folder)

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        self._count()
        data = b"".join(bytes(piece) for piece in pieces)
        self.undo.append((path.parent, lambda: path.unlink(missing_ok=True)))
        path.write_bytes(data[: len(data) // 2])
        self._count()
        path.write_bytes(data)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        before = new.read_bytes() if new.exists() else None

        def back() -> None:
            if new.exists():
                new.replace(old)
            if before is not None:
                new.write_bytes(before)

        self.undo.append((new.parent, back))
        super().rename(old, new)

    def sync(self, folder: Path) -> None:
        self._count()
        self.undo = [entry for entry in self.undo if entry[0] != folder]

    def remove(self, path: Path) -> None:
        self._count()
        if path.is_file():
            data = path.read_bytes()
            self.undo.append((path.parent, partial(_restore, path, data)))
        elif path.is_dir():
            self.undo.append((path.parent, lambda: path.mkdir(exist_ok=True)))
        super().remove(path)

    def lose(self) -> None:
        """Take back all names that were not synced, the last first."""
        for _, back in reversed(self.undo):
            back()


def _restore(path: Path, data: bytes) -> None:
    path.write_bytes(data)


class KilledDisk(CrashingDisk):
    """End this very process there with SIGKILL."""

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(Disk):
    """A disk that is full while `full` is set: half of the bytes find room."""

    def __init__(self) -> None:
        self.full = False

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        if self.full:
            data = b"".join(bytes(piece) for piece in pieces)
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(path, pieces)


def load_commit(
    folder: Path, device: str, expected: Mapping[str, Any], say: Say
) -> tuple[Loaded, list[Record]]:
    """Load one device's part of the newest commit that is whole for it.

    Args:
        folder: of all commits.
        device: whose part.
        expected: what the commit must be of: {"plan": hash, "graph": hash, "torch": version}.
        say: hears of each commit that is broken, and of the older one that is taken instead.

    Returns:
        The commit, and the newer ones that could not be used.

    Raises:
        CommitError: there is no commit, none is whole, or they are of something else.
    """
    found: list[Loaded] = []

    def load(record: Record) -> list[str]:
        try:
            found.append(CheckpointStore(folder).load(record, device, expected, say))
        except BrokenError as error:
            return [str(error)]
        return []

    _, unusable = first_loadable(CheckpointStore(folder).to_resume(say), load, say)
    return found[-1], unusable
