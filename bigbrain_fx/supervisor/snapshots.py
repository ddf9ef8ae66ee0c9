"""The snapshots of all devices in memory: which all have, and how often one is made.

Where a device's state comes from its peers in other replicas, none is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from .host_memory import available_bytes
from .interval import SnapshotCost, interval
from .snapshot_memory import SnapshotMemory, common


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
        """Hear of a whole snapshot of a device; return whether all now have a newer one."""
        self.slots[device].steps[slot] = step
        newest = common(list(self.slots.values()))
        if newest <= self.epoch:
            return False
        self.epoch = newest
        return True

    def take_back(self) -> None:
        """Forget those of steps after the newest that all devices have."""
        for slots in self.slots.values():
            slots.steps = [step if step <= self.epoch else -1 for step in slots.steps]

    def fall_back(self, device: str) -> None:
        """Hear that a process has died, and another begins where all have a snapshot.

        A later one of the dead process does not count: with it all might seem to have one, and the
        others would drop messages that the new process still wants.
        """
        slots = self.slots[device]
        slots.steps = [step if step <= self.epoch else -1 for step in slots.steps]

    def keep_beginning(self, step: int) -> None:
        """Hear that all devices have the beginning of a step until all have all of it."""
        self.epoch = step

    def leave_out(self, devices: Collection[str]) -> None:
        """Hear that some devices are lost for good; give their memory back."""
        for name in devices:
            self.slots.pop(name).close()
            self.costs.pop(name, None)

    def lose(self) -> None:
        """Hear that nobody has a device's state any more."""
        self.epoch = -1

    def measure(self, device: str, cost: SnapshotCost) -> bool:
        """Hear what snapshots cost a device; return whether `every` is now known by that."""
        self.costs[device] = cost
        if self.every is not None or len(self.costs) < len(self.slots):
            return False
        self.every = interval(self.costs.values(), available_bytes())
        return True

    def too_large(self, here: Collection[str]) -> tuple[int, int] | None:
        """Return what the second slots of some devices will take, and what is left of memory.

        None where that is less than half of it, or on a disk. First slots have theirs by now.
        """
        if not self.in_memory:
            return None
        wanted, left = sum(self.costs[name].state for name in here), available_bytes()
        return (wanted, left) if 2 * wanted > left else None

    def close(self) -> None:
        """Give the memory back."""
        for slots in self.slots.values():
            slots.close()
