"""Memory for snapshots, owned by the supervisor: device processes write it, and their end keeps it.

It has no name in any file system, so nothing is left to clean up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

SLOTS = 2  # the newest step that all devices have, and the one being written


@dataclass
class SnapshotMemory:
    """The slots of one device: a file descriptor each, and the step of the snapshot in it or -1."""

    files: list[int] = field(default_factory=lambda: _nameless_files())
    steps: list[int] = field(default_factory=lambda: [-1] * SLOTS)

    def close(self) -> None:
        """Give the memory back."""
        for file in self.files:
            os.close(file)
        self.files.clear()


def common(all_slots: Sequence[SnapshotMemory]) -> int:
    """Return the newest step of which every device has a snapshot; -1: there is none."""
    held = [set(slots.steps) for slots in all_slots]
    return max(set.intersection(*held) if held else set(), default=-1)


def _nameless_files() -> list[int]:
    files: list[int] = []
    try:
        while len(files) < SLOTS:
            files.append(nameless())
    except OSError:
        for file in files:
            os.close(file)
        raise
    return files


def nameless() -> int:
    """Return a file in memory that no file system knows; close it to give the memory back."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("snapshot", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
