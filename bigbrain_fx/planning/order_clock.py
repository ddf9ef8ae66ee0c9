"""One pipeline, made ready so that thousands of orders of it can be played: seconds of each.

The physics is that of `clock.played_s`, with jobs as numbers. A step in a row is played as devices
run it where nothing is clipped: the next begins on each when its own program ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from bigbrain_fx.planning.clock import Message, TimedStages

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
# One pipeline, made ready so that thousands of orders of it can be played: seconds of each.


MOST_STEPS = 6
"""In a row, until a period is taken for what the last of them took."""
_ALIKE = 1e-9


class OrderClock:
    """Plays orders of one pipeline.

    An order is a list of numbers of jobs; the orders of all devices are a list in the order of
    `devices`. `played` counts the jobs that were played: the work of a search.
    """

    def __init__(self, stages: VirtualStages) -> None:
        self.stages, self.played = stages, 0
        self.devices = stages.timed.devices
        self._micros = stages.micro_batches
        self.count = sum(len(stages.kinds(stage)) for stage in range(stages.count)) * self._micros
        numbers = range(len(Kind) * stages.count * self._micros)
        each = [divmod(job // self._micros, stages.count) for job in numbers]
        self.cost_s = [stages.job_s[kind][stage] for kind, stage in each]
        self.bytes = [stages.change_bytes(kind, stage) for kind, stage in each]
        self._needs: list[list[tuple[int, float]]] = [[] for _ in numbers]
        self._sends: list[list[tuple[int, int, float, float, float]]] = [[] for _ in numbers]
        self._slots = self._links = 0
        self._wire()
        timed = stages.timed
        self._begin_s = [timed.begin_s[device] for device in self.devices]
        self._once_s = [timed.once_s[device] for device in self.devices]
        room = [stages.memory_bytes.get(device, float("inf")) for device in self.devices]
        self.room = [most * (1 + _ALIKE) for most in room]

    def _wire(self) -> None:
        links: dict[tuple[int, int], int] = {}
        timed = self.stages.timed
        for kind, messages in ((Kind.FORWARD, timed.values), (Kind.BACKWARD, timed.gradients)):
            for message in filter(timed.crosses, messages):
                ends = timed.device_of[message.source], timed.device_of[message.target]
                self._add(kind, message, links.setdefault(ends, len(links)))
        self._links = len(links)

    def _add(self, kind: Kind, message: Message, link: int) -> None:
        for micro in range(self._micros):
            slot = self._slots + micro
            reader = self.number((kind, message.target, micro))
            self._needs[reader].append((slot, message.received_s))
            way = slot, link, message.sent_s, message.wire_s, message.latency_s
            self._sends[self.number((kind, message.source, micro))].append(way)
        self._slots += self._micros

    def number(self, job: JobOf) -> int:
        """Return a job's number."""
        kind, stage, micro = job
        return (int(kind) * self.stages.count + stage) * self._micros + micro

    def numbered(self, orders: Mapping[int, Sequence[JobOf]]) -> list[list[int]]:
        """Return orders as numbers."""
        return [list(map(self.number, orders[device])) for device in self.devices]

    def fits(self, device: int, jobs: Sequence[int]) -> bool:
        """Whether what the device of this place holds always has room."""
        return max(accumulate(map(self.bytes.__getitem__, jobs)), default=0.0) <= self.room[device]

    def all_fit(self, orders: Sequence[Sequence[int]]) -> bool:
        """Whether what every device holds always has room."""
        return all(self.fits(device, jobs) for device, jobs in enumerate(orders))

    def step_s(self, orders: Sequence[Sequence[int]]) -> float:
        """Return the seconds of a step alone; infinity where devices wait for each other."""
        end_s, free_s = list(self._begin_s), [0.0] * self._links
        if not self._follow(orders, end_s, free_s):
            return float("inf")
        return max(end + once for end, once in zip(end_s, self._once_s, strict=True))

    def row_s(self, orders: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return the seconds of one more step in a row, and those of a step alone."""
        end_s, free_s = list(self._begin_s), [0.0] * self._links
        alone_s = 0.0
        before: list[float] = []
        for _ in range(MOST_STEPS):
            if not self._follow(orders, end_s, free_s):
                return float("inf"), float("inf")
            ends = [end + once for end, once in zip(end_s, self._once_s, strict=True)]
            alone_s = alone_s or max(ends)
            if before and _is_shifted(before, ends):
                break
            last, before = before, ends
            end_s = [end + begin for end, begin in zip(ends, self._begin_s, strict=True)]
        else:
            return max(before) - max(last), alone_s
        return ends[0] - before[0], alone_s

    def _follow(
        self, orders: Sequence[Sequence[int]], end_s: list[float], free_s: list[float]
    ) -> bool:
        """Follow every device through its jobs; whether all came to their end."""
        arrived_s, waiting = [-1.0] * self._slots, [-1] * self._slots
        needs, sends, cost_s = self._needs, self._sends, self.cost_s
        done = [0] * len(orders)
        pending = list(reversed(range(len(orders))))
        while pending:
            device = pending.pop()
            end, at = end_s[device], done[device]
            for job in orders[device][at:]:
                now = end
                for slot, received_s in needs[job]:
                    there_s = arrived_s[slot]
                    if there_s < 0.0:
                        waiting[slot] = device
                        break
                    now = (there_s if there_s > now else now) + received_s
                else:
                    now += cost_s[job]
                    for slot, link, sent_s, wire_s, latency_s in sends[job]:
                        now += sent_s
                        free = free_s[link]
                        free = free_s[link] = (now if now > free else free) + wire_s
                        arrived_s[slot] = free + latency_s
                        if waiting[slot] >= 0:
                            pending.append(waiting[slot])
                            waiting[slot] = -1
                    end = now
                    at += 1
                    continue
                break
            end_s[device], done[device] = end, at
        self.played += self.count
        return done == [len(jobs) for jobs in orders]


def _is_shifted(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether every device ended its step just as much later than the step before."""
    by = after[0] - before[0]
    return all(abs(b - a - by) <= _ALIKE * b for a, b in zip(before, after, strict=True))
