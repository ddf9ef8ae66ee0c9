"""Snapshots of all devices: the newest common one, the interval, and memory for them.

Where a device's state comes from its peers in other replicas, there is no snapshot. A snapshot lies
in memory, or on a disk; the file has no name in any file system, so nothing is left to clean up.

A replacement replays the steps after the last snapshot, and the other devices store their messages
since then: the fewer steps, the better. Copying must stay a small share of a step. Slots take the
same memory whatever the interval, so the ratio of state to log does not enter.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .crew import Crew
    from .processes import Member
    from .votes import Votes


class Snapshots:
    """The slots of all devices, and what is in them.

    Args:
        devices: their names.
        every: steps from one snapshot to the next; None: found when all have measured their costs.
        folder: on a disk, where they lie; None: in memory.

    Attributes:
        epoch: the newest step of which every device has a snapshot, or a peer that keeps its
            beginning; -1: there is none.
        first: the step that the run began with: 0, or a commit's.

    Raises:
        OSError: this host has no memory, or no files, for them.
    """

    def __init__(
        self, devices: Sequence[str], every: int | None, folder: Path | None = None
    ) -> None:
        self.in_memory = folder is None
        self.slots: dict[str, SnapshotMemory] = {}
        try:
            for name in devices:
                self.slots[name] = SnapshotMemory.within(folder)
        except OSError:
            self.close()
            raise
        self.epoch = -1
        self.first = 0
        self.every = every
        self.costs: dict[str, SnapshotCost] = {}

    @property
    def start(self) -> int:
        """The step that a replacement begins with."""
        return max(self.epoch, self.first)

    def files(self) -> dict[str, int]:
        """Return the file descriptor of each device's snapshot of the newest common step."""
        return {name: s.files[s.steps.index(self.epoch)] for name, s in self.slots.items()}

    def take(self, device: str, step: int, slot: int) -> bool:
        """Note a whole snapshot of a device; return whether all now have a newer one."""
        self.slots[device].steps[slot] = step
        newest = common(list(self.slots.values()))
        if newest <= self.epoch:
            return False
        self.epoch = newest
        return True

    def fall_back(self, device: str) -> None:
        """Note that a process has died, and another begins where all have a snapshot.

        A later one of the dead process does not count. With it all might seem to have one, and the
        others would drop messages that the new process still needs.
        """
        slots = self.slots[device]
        slots.steps = [step if step <= self.epoch else -1 for step in slots.steps]

    def measure(self, device: str, cost: SnapshotCost, left: int) -> bool:
        """Receive what snapshots cost a device; return whether `every` is now known by that.

        left: bytes of memory that can still be taken.
        """
        self.costs[device] = cost
        if self.every is not None or len(self.costs) < len(self.slots):
            return False
        self.every = interval(self.costs.values(), left)
        return True

    def close(self) -> None:
        """Give the memory back."""
        for slots in self.slots.values():
            slots.close()


COPY_SHARE = 0.01  # of a step
MEMORY_SHARE = 0.125  # of what is available


@dataclass(frozen=True)
class SnapshotCost:
    """Measurements of one device.

    Attributes:
        state: bytes of a snapshot.
        log: bytes that the other devices keep for it per step.
        copy_s: time of one copy into a slot.
        step_s: time of one step.
    """

    state: int
    log: int
    copy_s: float
    step_s: float


def interval(costs: Iterable[SnapshotCost], available_bytes: int) -> int:
    """Return the steps between snapshots, one number for all devices.

    All devices must have the same interval: a device's log serves the others from the newest step
    that all have. Twice the log of an interval, until all have the next snapshot, takes an eighth
    of the memory at most.
    """
    known = list(costs)
    logs = sum(cost.log for cost in known)
    least = max(math.ceil(cost.copy_s / (COPY_SHARE * max(cost.step_s, 1e-6))) for cost in known)
    most = max(1, int(MEMORY_SHARE * available_bytes / (2 * logs))) if logs else least
    return max(1, min(least, most))


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
    """Return a file in memory, or on a folder's disk, that has no name; closed, its space is free.

    Raises:
        OSError: there is no such folder, or no more files may be open.
    """
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("snapshot", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def free_bytes() -> int:
    """Return the memory that this whole host has free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Snapshotting:
    """Tell all which snapshot counts, and how often one is made.

    Args:
        crew: the processes.
        snapshots: of all devices.
        votes: of steps that nobody runs again.
    """

    def __init__(self, crew: Crew, snapshots: Snapshots, votes: Votes) -> None:
        self.crew, self.snapshots, self.votes = crew, snapshots, votes
        self.policies = crew.policies

    def hear_cost(self, member: Member, state: int, log: int, copy_s: float, step_s: float) -> None:
        """Receive what a snapshot costs a device."""
        assert member.device is not None
        cost = SnapshotCost(state, log, copy_s, step_s)
        left = next(iter(self.policies.ask("left_bytes")), free_bytes())
        if self.snapshots.measure(member.device, cost, left):
            self.crew.tell("every", steps=self.snapshots.every)
            self.policies.ask("mind", self.snapshots, left)

    def hear_snapshot(self, member: Member, step: int, slot: int, bytes: int) -> None:
        """Note a device's whole snapshot; it counts when its step is clean."""
        self.policies.when_clean(step, lambda: self._take(member, step, slot))

    def _take(self, member: Member, step: int, slot: int) -> None:
        if member not in self.crew.at_work():  # it has died since, and another begins before it
            return
        assert member.device is not None
        if not self.snapshots.take(member.device, step, slot):
            return
        newest = self.snapshots.epoch
        self.crew.tell("epoch", step=newest)
        self.votes.forget_steps(before=newest)
        if self.policies.any("snapshot", newest):
            self.crew.report("log_whole", step=newest)
        self.crew.report("snapshot", step=newest, every=self.snapshots.every)
