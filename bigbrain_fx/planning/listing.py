"""List scheduling with lookahead, within each device's memory: the next job of a free device.

A BackwardWeight fills gaps: it is taken when no Forward and no Backward may begin, nor is known to
arrive soon. A Forward is admitted only if every micro-batch on the
device could still end, one after another, within the free bytes (Dijkstra's banker). The earliest
unfinished micro-batch can then go on everywhere, and no order blocks. A limit of micro-batches does
not block either: they enter every stage in ascending order.

Source: Graham 1969 (list scheduling). Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 3
(a heuristic order under a memory limit); here it serves any stages on any devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise, product
from math import ceil

from bigbrain_fx.planning.clock import JobOf, Kind, Message, OrdersOf, TimedStages, VirtualStages

_NEVER = float("inf")
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Taste:
    """Priority rule of a device.

    Attributes:
        patience: how long it waits for what is known to arrive, in times of its BackwardWeight.
        deep: of Forwards it takes the latest stage first, else the earliest micro-batch.
        forwards_first: before Backwards.
        in_flight: micro-batches at most on the last device, and one more on each before it.
    """

    patience: float = 0.0
    deep: bool = True
    forwards_first: bool = False
    in_flight: int | None = None


def tastes(splits: bool) -> Iterator[Taste]:
    """Yield the preferences worth a try, the most promising first."""
    patience = (0.0, 0.7, 1.0, 0.3) if splits else (0.0,)
    every = product((None, 1, 2, 3, 4), patience, (True, False), (False, True))
    yield from (Taste(wait, deep, first, most) for most, wait, deep, first in every)


def list_orders(
    stages: VirtualStages, taste: Taste, limits: Mapping[int, int] | None = None
) -> OrdersOf | None:
    """Simulate a step and return each device's jobs in order; None where memory is short.

    Args:
        stages: the pipeline.
        taste: priority rule of a free device.
        limits: device -> the most micro-batches on it at once, in place of the rule's.
    """
    return _Play(stages, taste, limits or {}).orders()


def stays_s(stages: VirtualStages) -> Mapping[int, float]:
    """Return how long a step stays on each device, from its first job there to its last."""
    play = _Play(stages, Taste(deep=False), {})
    play.orders()
    return {device: play.last_s[device] - begun_s for device, begun_s in play.first_s.items()}


class _Play:
    """One step, played through in time: mutable, used once."""

    def __init__(self, stages: VirtualStages, taste: Taste, limits: Mapping[int, int]) -> None:
        self.stages, self.taste, timed = stages, taste, stages.timed
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}
        self._into: dict[tuple[int, int], list[tuple[int, Message]]] = {}
        self._out_of: dict[tuple[int, int], list[tuple[int, Message]]] = {}
        every = [(Kind.FORWARD, m) for m in timed.values]
        every += [(Kind.BACKWARD, m) for m in timed.gradients]
        for number, (kind, message) in enumerate(every):
            self._into.setdefault((kind, message.target), []).append((number, message))
            self._out_of.setdefault((kind, message.source), []).append((number, message))
        self._arrived_s: list[list[float]] = [[] for _ in every]
        self._next: dict[tuple[int, int], int] = {
            (kind, s): 0 for s in range(stages.count) for kind in stages.kinds(s)
        }
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._busy_s = {device: timed.begin_s[device] for device in timed.devices}
        self._events = [(busy, i, d) for i, (d, busy) in enumerate(self._busy_s.items())]
        self._done: dict[int, list[JobOf]] = {device: [] for device in timed.devices}
        self._books = {
            device: _Book(stages, device, limits.get(device, self._most(device)))
            for device in timed.devices
        }
        self._ranks = {device: self._ranked(device) for device in timed.devices}

    def _most(self, device: int) -> float:
        """Return how many micro-batches may be on a device at once, by the taste."""
        devices = self.stages.timed.devices
        ahead = len(devices) - 1 - devices.index(device)
        return _NEVER if self.taste.in_flight is None else self.taste.in_flight + ahead

    def orders(self) -> OrdersOf | None:
        while self._events:
            now_s, _, device = heappop(self._events)
            if self._busy_s[device] <= now_s:
                self._start(device, now_s)
        if any(count < self.stages.micro_batches for count in self._next.values()):
            return None
        return {device: tuple(jobs) for device, jobs in self._done.items()}

    def _ranked(self, device: int) -> tuple[list[tuple[Kind, int]], list[int]]:
        """Return what a device asks for first, kind by kind; and its stages that have a W."""
        own = self.stages.on[device]
        backwards = [(Kind.BACKWARD, s) for s in own[::-1] if (Kind.BACKWARD, s) in self._next]
        forwards = [(Kind.FORWARD, s) for s in (own[::-1] if self.taste.deep else own)]
        first = [*forwards, *backwards] if self.taste.forwards_first else [*backwards, *forwards]
        return first, [s for s in own[::-1] if (Kind.BACKWARD_WEIGHT, s) in self._next]

    def _start(self, device: int, now_s: float) -> None:
        job = self._choice(device, now_s)
        if job is None:
            return
        kind, stage, _ = job
        self._next[kind, stage] += 1
        self._done[device].append(job)
        self._books[device].enter(job)
        end_s = now_s + self.stages.job_s[kind][stage]
        end_s += sum(message.received_s for _, message in self._into.get((kind, stage), ()))
        for number, message in self._out_of.get((kind, stage), ()) if kind < 2 else ():
            end_s = self._send(number, message, end_s)
        self.first_s.setdefault(device, now_s)
        self._busy_s[device] = self.last_s[device] = end_s
        self._wake(end_s, device)

    def _send(self, number: int, message: Message, now_s: float) -> float:
        """Send a message; return when its device has handled it."""
        homes = self.stages.timed.device_of
        a, b = homes[message.source], homes[message.target]
        if a == b:
            self._arrived_s[number].append(now_s)
            return now_s
        now_s += message.sent_s
        free_s = max(now_s, self._link_free_s.get((a, b), 0.0)) + message.wire_s
        self._link_free_s[a, b] = free_s
        self._arrived_s[number].append(free_s + message.latency_s)
        self._wake(free_s + message.latency_s, b)
        return now_s

    def _wake(self, when_s: float, device: int) -> None:
        heappush(self._events, (when_s, len(self._events), device))

    def _choice(self, device: int, now_s: float) -> JobOf | None:
        """Return what a free device takes: what may begin, else a BackwardWeight, else nothing."""
        first, with_weights = self._ranks[device]
        soon_s = _NEVER
        ready: list[JobOf] = []
        for kind, stage in first:
            job = kind, stage, self._next[kind, stage]
            when_s = self._ready_s(*job)
            if when_s == _NEVER or not self._books[device].admits(job):
                continue
            if when_s <= now_s:
                ready.append(job)
            soon_s = min(soon_s, when_s)
        if ready:
            return self._preferred(ready)
        return self._filling(with_weights, now_s, soon_s)

    def _preferred(self, ready: list[JobOf]) -> JobOf:
        """Return the first in rank; of Backwards, and of Forwards not deep, the earliest micro."""
        kind = ready[0][0]
        alike = [job for job in ready if job[0] == kind]
        if kind == Kind.FORWARD and self.taste.deep:
            return alike[0]
        return min(alike, key=lambda job: job[2])

    def _filling(self, stages: list[int], now_s: float, soon_s: float) -> JobOf | None:
        waiting = [(self._next[2, s], -s) for s in stages if self._next[2, s] < self._next[0, s]]
        if not waiting:
            return None
        micro, negative = min(waiting)
        if soon_s < now_s + self.taste.patience * self.stages.job_s[2][-negative]:
            return None
        return Kind.BACKWARD_WEIGHT, -negative, micro

    def _ready_s(self, kind: int, stage: int, micro: int) -> float:
        """Return when all that a job waits for is there; never, where that is not known yet."""
        if micro >= self.stages.micro_batches:
            return _NEVER
        if kind == Kind.BACKWARD and self._next[Kind.FORWARD, stage] <= micro:
            return _NEVER
        latest_s = 0.0
        for number, _ in self._into.get((kind, stage), ()):
            arrived_s = self._arrived_s[number]
            if len(arrived_s) <= micro:
                return _NEVER
            latest_s = max(latest_s, arrived_s[micro])
        return latest_s


class _Book:
    """Use of a device's memory, micro-batch by micro-batch: mutable."""

    def __init__(self, stages: VirtualStages, device: int, most: float) -> None:
        self._stages, own = stages, stages.on[device]
        # more may stay after Backward than before: that is claimed from the first
        self._claim = {s: stages.claim_bytes(s) for s in own}
        self._whole = sum(self._claim.values())
        self._jobs = sum(len(stages.kinds(s)) for s in own)
        self._room = stages.memory_bytes.get(device, _NEVER) * _SLACK
        self._free = self._room
        self._held: dict[int, float] = {}  # micro -> bytes
        self._asks: dict[int, float] = {}  # micro -> bytes that it will still ask for
        self._left: dict[int, int] = {}  # micro -> jobs
        self._most_inside = most

    def admits(self, job: JobOf) -> bool:
        """Whether all that is here could still end if this began; only a Forward asks for more."""
        kind, stage, micro = job
        if kind != Kind.FORWARD:
            return True
        if micro not in self._left and len(self._left) >= self._most_inside:
            return False
        if self._room == _NEVER:
            return True
        claim = self._claim[stage]
        free = self._free - claim
        if free < 0:
            return False
        asks = {**self._asks, micro: self._asks.get(micro, self._whole) - claim}
        for number in sorted(asks):
            if asks[number] > free:
                return False
            free += self._held.get(number, 0.0) + (claim if number == micro else 0.0)
        return True

    def enter(self, job: JobOf) -> None:
        """Note that a job has begun."""
        kind, stage, micro = job
        change = self._change(kind, stage)
        self._free -= change
        self._held[micro] = self._held.get(micro, 0.0) + change
        if kind == Kind.FORWARD:
            self._asks[micro] = self._asks.get(micro, self._whole) - self._claim[stage]
        self._left[micro] = self._left.get(micro, self._jobs) - 1
        if not self._left[micro]:
            self._free += self._held.pop(micro)  # nothing, but for rounding
            del self._left[micro], self._asks[micro]

    def _change(self, kind: int, stage: int) -> float:
        """Return what a job claims, or gives back when it ends: nothing else begins before that."""
        if kind == Kind.FORWARD:
            return self._claim[stage]
        change = self._stages.change_bytes(kind, stage)
        if kind == Kind.BACKWARD:
            return change - (self._claim[stage] - self._stages.saved_bytes[stage])
        return change


# ------------------------------------------------------------- how many micro-batches are in flight


def in_flight_to_fill(
    stages: TimedStages, micro_batches: int, untrained: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Return how many micro-batches each device needs in flight to keep the slowest one busy.

    Little's law: the time that one micro-batch, alone, stays on the device, over the time between
    two micro-batches at the slowest device or link. On a chain each hop is rounded up on its own,
    since 1F1B alternates in lockstep. With free links, p equal stages get p - s, as in classic
    1F1B. The numbers never grow from stage to stage, as `1f1b` needs. With several stages per
    device micro-batches queue for one another, and one more is let in.

    Returns:
        One number per device, from 1 to `micro_batches`, in the order of `stages.devices`.
    """
    cycle_s = _busiest_s(stages, untrained)
    if cycle_s <= 0.0:
        return (micro_batches,) * len(stages.devices)
    alone_s = stays_s(VirtualStages.unsplit(stages, 1, untrained))
    each_s = [alone_s[device] for device in stages.devices]
    if stages.is_chain:
        hops_s = [a - b for a, b in pairwise((*each_s, 0.0))]
        counts = [sum(_rounds(hop_s, cycle_s) for hop_s in hops_s[i:]) for i in range(len(hops_s))]
    else:
        counts = [_rounds(stay_s, cycle_s) + 1 for stay_s in each_s]
    return tuple(max(1, min(micro_batches, count)) for count in counts)


def _rounds(time_s: float, cycle_s: float) -> int:
    """Return how many cycles it takes, at least 0; a rounding error does not count as a cycle."""
    return max(0, ceil(time_s / cycle_s - 1e-9))


def _busiest_s(stages: TimedStages, untrained: frozenset[int]) -> float:
    """Return the most seconds of work that a micro-batch brings to any device or link."""
    loads: dict[tuple[int, int], float] = defaultdict(float)
    for stage, device in enumerate(stages.device_of):
        loads[device, device] += stages.forward_s[stage]
        loads[device, device] += 0.0 if stage in untrained else stages.backward_s[stage]
    for message in (*stages.values, *stages.gradients):
        if stages.crosses(message):
            ends = stages.device_of[message.source], stages.device_of[message.target]
            loads[ends] += message.wire_s
    return max(loads.values())
