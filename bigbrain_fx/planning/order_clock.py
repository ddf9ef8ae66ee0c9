"""Stages of which a device may have several, and the seconds of their orders.

The physics is that of `clock.follow`. A step in a row is played as devices run it where nothing is
clipped: the next begins on each when its own program ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

from bigbrain_fx.planning.clock import TimedStages, follow

# ------------------------------------------------------------------------------------------------
# Virtual stages: several pieces of a pipeline on a device, backwards split in two, bytes and room.
#
#   V, 3 devices       stage    0 1 2 3 4 5        loop, 2 devices    stage    0 1 2 3
#                      device   a b c c b a                           device   a b a b


class Kind(IntEnum):
    """What a job computes; the first two are `clock.Job`'s "is it a forward"."""

    BACKWARD = 0
    FORWARD = 1
    BACKWARD_WEIGHT = 2


JobOf: TypeAlias = tuple[int, int, int]
"""(kind, stage, micro-batch)"""

OrdersOf: TypeAlias = Mapping[int, tuple[JobOf, ...]]
"""Device -> its jobs in order."""


@dataclass(frozen=True)
class VirtualStages:
    """A step of so many micro-batches over stages of which a device may have several.

    Attributes:
        timed: seconds and messages; `backward_s` is of what does not wait for a BackwardWeight.
        micro_batches: of a step.
        backward_weight_s: per stage; None where nothing waits: its Backward makes all gradients.
        saved_bytes: per stage, what stays from Forward to Backward.
        waiting_bytes: per stage, what stays from Backward to BackwardWeight.
        memory_bytes: per device, room for both; a device that is not named has no limit.
        untrained: stages that have no Backward.
    """

    timed: TimedStages
    micro_batches: int
    backward_weight_s: tuple[float | None, ...]
    saved_bytes: tuple[float, ...]
    waiting_bytes: tuple[float, ...]
    memory_bytes: Mapping[int, float]
    untrained: frozenset[int] = frozenset()

    @staticmethod
    def unsplit(
        timed: TimedStages, micro_batches: int, untrained: frozenset[int] = frozenset()
    ) -> VirtualStages:
        """Return stages of whole backwards, of which nobody counts the bytes."""
        none, nothing = (None,) * len(timed.device_of), (0.0,) * len(timed.device_of)
        return VirtualStages(timed, micro_batches, none, nothing, nothing, {}, untrained)

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.timed.device_of)

    @property
    def splits(self) -> bool:
        """Whether any backward is split in two."""
        return any(seconds is not None for seconds in self.backward_weight_s)

    def kinds(self, stage: int) -> tuple[Kind, ...]:
        """Return what is computed of a stage for each micro-batch, in this order."""
        if stage in self.untrained:
            return (Kind.FORWARD,)
        if self.backward_weight_s[stage] is None:
            return Kind.FORWARD, Kind.BACKWARD
        return Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT

    @cached_property
    def on(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of each device, ascending."""
        homes = self.timed.device_of
        return {
            device: tuple(stage for stage, home in enumerate(homes) if home == device)
            for device in self.timed.devices
        }

    @cached_property
    def job_s(self) -> tuple[Sequence[float], ...]:
        """What each kind of job takes of its device, by kind and stage, handling left out."""
        own = [self.timed.instruction_s[device] for device in self.timed.device_of]
        later = [0.0 if seconds is None else seconds for seconds in self.backward_weight_s]
        each = self.timed.backward_s, self.timed.forward_s, later
        return tuple([a + b for a, b in zip(own, kind, strict=True)] for kind in each)

    @cached_property
    def local(self) -> frozenset[tuple[int, int, int]]:
        """What stays on one device: (kind, stage that makes it, stage that reads it)."""
        ways = (Kind.FORWARD, self.timed.values), (Kind.BACKWARD, self.timed.gradients)
        return frozenset(
            (kind, message.source, message.target)
            for kind, messages in ways
            for message in messages
            if not self.timed.crosses(message)
        )

    def whole(self) -> VirtualStages:
        """Return the same with no backward split."""
        later = (seconds or 0.0 for seconds in self.backward_weight_s)
        backward_s = tuple(a + b for a, b in zip(self.timed.backward_s, later, strict=True))
        none = (None,) * self.count
        return replace(
            self, timed=replace(self.timed, backward_s=backward_s), backward_weight_s=none
        )

    def peaks(self, orders: Mapping[int, Sequence[JobOf]]) -> Mapping[int, float]:
        """Return the most bytes that each device holds of what is saved and what waits."""
        return {device: self._peak(jobs) for device, jobs in orders.items()}

    def _peak(self, jobs: Sequence[JobOf]) -> float:
        now = most = 0.0
        for kind, stage, _ in jobs:
            now += self.change_bytes(kind, stage)
            most = max(most, now)
        return most

    def claim_bytes(self, stage: int) -> float:
        """Return the most that a micro-batch of a stage takes, before its Backward or after."""
        if stage in self.untrained:
            return 0.0
        waits = self.backward_weight_s[stage] is not None
        return max(self.saved_bytes[stage], self.waiting_bytes[stage] if waits else 0.0)

    def change_bytes(self, kind: int, stage: int) -> float:
        """Return by how much a job changes what its device holds."""
        if kind == Kind.FORWARD:
            return 0.0 if stage in self.untrained else self.saved_bytes[stage]
        waiting = 0.0 if self.backward_weight_s[stage] is None else self.waiting_bytes[stage]
        return -waiting if kind == Kind.BACKWARD_WEIGHT else waiting - self.saved_bytes[stage]


def v_line(devices: int) -> tuple[int, ...]:
    """Return the devices of a V: there, and back."""
    return (*range(devices), *reversed(range(devices)))


def loop_line(devices: int, pieces: int) -> tuple[int, ...]:
    """Return the devices of a loop: round and round."""
    return tuple(range(devices)) * pieces


# ------------------------------------------------------------------------------------------------
# Orders of one pipeline, played: seconds of a step alone and in a row.


MOST_STEPS = 6
"""In a row, until a period is taken for what the last of them took."""
_ALIKE = 1e-9


class OrderClock:
    """Plays orders of one pipeline; `played` counts the jobs that were: the work of a search."""

    def __init__(self, stages: VirtualStages) -> None:
        self.stages, self.played = stages, 0
        self.count = sum(len(stages.kinds(s)) for s in range(stages.count)) * stages.micro_batches

    def fits(self, orders: OrdersOf) -> bool:
        """Whether what every device holds always has room."""
        room = self.stages.memory_bytes
        peaks = self.stages.peaks(orders).items()
        return all(most <= room.get(device, float("inf")) * (1 + _ALIKE) for device, most in peaks)

    def step_s(self, orders: OrdersOf) -> float:
        """Return the seconds of a step alone; infinity where devices wait for each other."""
        return max(self._ends_s(orders, *self._begun()))

    def row_s(self, orders: OrdersOf) -> tuple[float, float]:
        """Return the seconds of one more step in a row, and those of a step alone."""
        begin_s, (end_s, free_s) = self.stages.timed.begin_s, self._begun()
        alone_s = 0.0
        before: list[float] = []
        for _ in range(MOST_STEPS):
            ends = self._ends_s(orders, end_s, free_s)
            if ends[0] == float("inf"):
                return ends[0], ends[0]
            alone_s = alone_s or max(ends)
            if before and _is_shifted(before, ends):
                break
            last, before = before, ends
            end_s = {d: end + begin_s[d] for d, end in zip(end_s, ends, strict=True)}
        else:
            return max(before) - max(last), alone_s
        return ends[0] - before[0], alone_s

    def _begun(self) -> tuple[dict[int, float], list[float]]:
        timed = self.stages.timed
        return {d: timed.begin_s[d] for d in timed.devices}, [0.0] * len(timed.links)

    def _ends_s(
        self, orders: OrdersOf, end_s: dict[int, float], free_s: list[float]
    ) -> list[float]:
        """Return when each device is done; never, where they wait for each other."""
        timed = self.stages.timed
        self.played += self.count
        if not follow(timed, self.stages.job_s, orders, end_s, free_s):
            return [float("inf")]
        return [end + timed.once_s[device] for device, end in end_s.items()]


def _is_shifted(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether every device ended its step just as much later than the step before."""
    by = after[0] - before[0]
    return all(abs(b - a - by) <= _ALIKE * b for a, b in zip(before, after, strict=True))
