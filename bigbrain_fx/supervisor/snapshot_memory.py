"""Room for snapshots, owned by the supervisor: device processes write it, and their end keeps it.

It is in memory, or on a disk where memory is short. It has no name in any file system, so nothing
is left to clean up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SLOTS = 2  # the newest step that all devices have, and the one being written


@dataclass
class SnapshotMemory:
    """The slots of one device: a file descriptor each, and the step of the snapshot in it or -1."""

    files: list[int] = field(default_factory=lambda: _nameless_files())
    steps: list[int] = field(default_factory=lambda: [-1] * SLOTS)

    @classmethod
    def within(cls, folder: Path | None) -> SnapshotMemory:
        """Make slots in a folder of a disk; None: in memory."""
        return cls(_nameless_files(folder))

    def close(self) -> None:
        """Give the memory back."""
        for file in self.files:
            os.close(file)
        self.files.clear()


def common(all_slots: Sequence[SnapshotMemory]) -> int:
    """Return the newest step of which every device has a snapshot; -1: there is none."""
    held = [set(slots.steps) for slots in all_slots]
    return max(set.intersection(*held) if held else set(), default=-1)


def _nameless_files(folder: Path | None = None) -> list[int]:
    files: list[int] = []
    try:
        while len(files) < SLOTS:
            files.append(nameless(folder))
    except OSError:
        for file in files:
            os.close(file)
        raise
    return files


def nameless(folder: Path | None = None) -> int:
    """Return a file in memory, or on a folder's disk, that has no name; closed, its room is free.

    Raises:
        OSError: there is no such folder, or no more files may be open.
    """
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("snapshot", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
