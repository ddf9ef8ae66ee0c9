"""How many steps from one snapshot in memory to the next.

A replacement computes again what came after the last snapshot, and the others keep their messages
since then: the fewer steps, the better. Copying takes time, though, and must stay a small share of
a step. Slots take the same memory whatever the interval, so the ratio of state to log, at which
both would take as much, does not enter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

COPY_SHARE = 0.01  # of a step
MEMORY_SHARE = 0.125  # of what is available


@dataclass(frozen=True)
class SnapshotCost:
    """What one device measured.

    Attributes:
        state: bytes of a snapshot.
        log: bytes that the others keep for it per step.
        copy_s: time of one copy into a slot.
        step_s: time of one step.
    """

    state: int
    log: int
    copy_s: float
    step_s: float


def interval(costs: Iterable[SnapshotCost], available_bytes: int) -> int:
    """Return the steps between snapshots, one number for all devices.

    They must agree: a device's log serves the others from the newest step that all have. Twice the
    log of an interval, until all have the next snapshot, takes an eighth of the memory at most.
    """
    known = list(costs)
    logs = sum(cost.log for cost in known)
    least = max(math.ceil(cost.copy_s / (COPY_SHARE * max(cost.step_s, 1e-6))) for cost in known)
    most = max(1, int(MEMORY_SHARE * available_bytes / (2 * logs))) if logs else least
    return max(1, min(least, most))
