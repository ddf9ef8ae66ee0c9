"""Stages in seconds, and the order of each device's jobs -> the time when the last device is done.

The physics is that of `plan.simulate.clock`, without instructions, names and text. A device takes
its jobs in order. A job waits for its messages, takes the process for handling them, computes, and
sends. A message leaves when its link is free, and latency does not occupy the link. Every returned
plan has been simulated in full; planners compare thousands of placements by this clock.

The clock does not know graphs, memory or clusters; the caller that makes `Stages` gives all times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from operator import add
from typing import Any, TypeAlias

Job = tuple[bool, int, int]  # (is it a forward, stage, micro-batch)
Orders = Mapping[int, Sequence[Job]]  # device -> its jobs in order


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way to a later stage, or its gradient to an earlier one, of a micro-batch.

    Attributes:
        source, target: stages.
        nbytes: of the value.
        wire_s: for so long its link is taken; 0 within a device.
        latency_s: comes on top.
        sent_s, received_s: what handling it takes of the processes at its ends.
    """

    source: int
    target: int
    nbytes: int
    wire_s: float = 0.0
    latency_s: float = 0.0
    sent_s: float = 0.0
    received_s: float = 0.0

    @property
    def way_s(self) -> float:
        """When it is there, where nothing else is on its link."""
        return self.wire_s + self.latency_s


@dataclass(frozen=True)
class TimedStages:
    """Stages in an order in which they can run; devices are numbers.

    Attributes:
        device_of: per stage.
        forward_s, backward_s: per stage, of one micro-batch.
        values, gradients: what goes between stages, those on one device included.
        begin_s: per device: before its first job.
        instruction_s: per device: on top of each job.
        once_s: per device: after its last job.
    """

    device_of: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    values: tuple[Message, ...]
    gradients: tuple[Message, ...]
    begin_s: Mapping[int, float]
    instruction_s: Mapping[int, float]
    once_s: Mapping[int, float]

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(set(self.device_of)) == len(self.device_of)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(self.device_of))

    @cached_property
    def job_s(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the seconds of backward and forward of each stage on its device."""
        own = [self.instruction_s[device] for device in self.device_of]
        return list(map(add, self.backward_s, own)), list(map(add, self.forward_s, own))

    def crosses(self, message: Message) -> bool:
        """Whether a message goes from one device to another."""
        return self.device_of[message.source] != self.device_of[message.target]

    @cached_property
    def links(self) -> Mapping[tuple[int, int], int]:
        """Numbers of the links that messages take, by the devices at their ends."""
        ends = dict.fromkeys(self._ends(message) for *_, message in self._crossing())
        return {pair: number for number, pair in enumerate(ends)}

    @cached_property
    def into(self) -> tuple[list[list[tuple[int, float]]], ...]:
        """Each job's awaited messages, by kind and stage: the message's number, and handling."""
        found: tuple[list[list[tuple[int, float]]], ...] = self._empty()
        for number, kind, message in self._crossing():
            found[kind][message.target].append((number, message.received_s))
        return found

    @cached_property
    def out_of(self) -> tuple[list[list[tuple[int, int, float, float, float]]], ...]:
        """Each job's sent messages, in order: the message's number, its link, and its seconds."""
        found: tuple[list[list[tuple[int, int, float, float, float]]], ...] = self._empty()
        for number, kind, message in self._crossing():
            link = self.links[self._ends(message)]
            seconds = message.sent_s, message.wire_s, message.latency_s
            found[kind][message.source].append((number, link, *seconds))
        return found

    def _empty(self) -> tuple[list[list[Any]], ...]:
        return tuple([[] for _ in self.device_of] for _ in Kind)

    def _ends(self, message: Message) -> tuple[int, int]:
        return self.device_of[message.source], self.device_of[message.target]

    def _crossing(self) -> Iterator[tuple[int, bool, Message]]:
        for number, message in enumerate((*self.values, *self.gradients)):
            if self.crosses(message):
                yield number, number < len(self.values), message


def forwards(stages: TimedStages, micro_batches: int) -> Orders:
    """Return the order of inference: micro-batch after micro-batch, as they come along."""
    cells = (
        (stage + micro, stage, micro, device)
        for stage, device in enumerate(stages.device_of)
        for micro in range(micro_batches)
    )
    orders: dict[int, list[Job]] = {device: [] for device in stages.devices}
    for _, stage, micro, device in sorted(cells):
        orders[device].append((True, stage, micro))
    return orders


def alternating(stages: TimedStages, micro_batches: int, in_flight: Sequence[int]) -> Orders:
    """Return the order of 1F1B, for one stage per device, with so many in flight at each."""
    return {
        device: one_f_one_b_of(stage, micro_batches, min(in_flight[stage], micro_batches))
        for stage, device in enumerate(stages.device_of)
    }


@lru_cache(maxsize=4096)
def one_f_one_b_of(stage: int, micro_batches: int, warm_up: int) -> tuple[Job, ...]:
    """Return F 0..w-1, then B0 F w B1 F w+1 ..., then the backwards that are left."""
    order = [(True, stage, micro) for micro in range(warm_up)]
    for micro in range(micro_batches):
        order.append((False, stage, micro))
        if warm_up + micro < micro_batches:
            order.append((True, stage, warm_up + micro))
    return tuple(order)


def played_s(stages: TimedStages, orders: Orders, trains: bool) -> float:
    """Return when the last device is done; infinity where devices wait for each other.

    Args:
        stages: what everything takes.
        orders: of each device; the micro-batches of a stage ascend.
        trains: whether there is something to do once a step.
    """
    end_s = {device: stages.begin_s[device] for device in orders}
    if not follow(stages, stages.job_s, orders, end_s, [0.0] * len(stages.links)):
        return float("inf")
    once_s = stages.once_s if trains else {}
    return max(now_s + once_s.get(device, 0.0) for device, now_s in end_s.items())


def follow(
    stages: TimedStages,
    job_s: Sequence[Sequence[float]],
    orders: Mapping[int, Sequence[tuple[int, int, int]]],
    end_s: dict[int, float],
    free_s: list[float],
) -> bool:
    """Follow the devices through their jobs; return whether all came to their end.

    Only its source device ever uses a link, so devices are followed one after another, each as far
    as what it waits for is there.

    Args:
        stages: what messages take.
        job_s: what each kind of job takes of each stage.
        orders: of each device: kind, stage and micro-batch; these ascend for a stage.
        end_s: when each device begins; then when it ends.
        free_s: when each link is free, by its number; likewise.
    """
    into, out_of = stages.into, stages.out_of
    arrived_s: list[list[float]] = [[] for _ in (*stages.values, *stages.gradients)]
    waiting = [-1] * len(arrived_s)  # by message: the device that waits for it
    done = dict.fromkeys(orders, 0)
    pending = list(reversed(tuple(orders)))
    while pending:
        device = pending.pop()
        now_s, jobs, at = end_s[device], orders[device], done[device]
        while at < len(jobs):  # no slice: a device may be woken for every job
            kind, stage, micro = jobs[at]
            begin_s = now_s
            for number, received_s in into[kind][stage]:
                there_s = arrived_s[number]
                if len(there_s) <= micro:
                    waiting[number] = device
                    break
                begin_s = max(begin_s, there_s[micro]) + received_s
            else:
                now_s = begin_s + job_s[kind][stage]
                for number, link, sent_s, wire_s, latency_s in out_of[kind][stage]:
                    now_s += sent_s
                    free_s[link] = max(now_s, free_s[link]) + wire_s
                    arrived_s[number].append(free_s[link] + latency_s)
                    if waiting[number] >= 0:
                        pending.append(waiting[number])
                        waiting[number] = -1
                at += 1
                continue
            break
        end_s[device], done[device] = now_s, at
    return all(done[device] == len(jobs) for device, jobs in orders.items())


# ------------------------------------------------------------------------------------------------
# Virtual stages: several pieces of a pipeline on a device, backwards split in two, bytes and room.
#
#   V, 3 devices       stage    0 1 2 3 4 5        loop, 2 devices    stage    0 1 2 3
#                      device   a b c c b a                           device   a b a b


class Kind(IntEnum):
    """Each job's stage, micro-batch and kind; the first two are `clock.Job`'s "is it a forward"."""

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
        memory_bytes: per device, memory for both; a device that is not named has no limit.
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
        """Seconds of each kind of job on its device, by kind and stage, handling left out."""
        own = [self.timed.instruction_s[device] for device in self.timed.device_of]
        later = [0.0 if seconds is None else seconds for seconds in self.backward_weight_s]
        each = self.timed.backward_s, self.timed.forward_s, later
        return tuple([a + b for a, b in zip(own, kind, strict=True)] for kind in each)

    @cached_property
    def local(self) -> frozenset[tuple[int, int, int]]:
        """Values that stay on one device: (kind, stage that makes it, stage that reads it)."""
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
        """Whether every device always has memory for what it holds."""
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
