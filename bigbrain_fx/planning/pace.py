"""How long a chain of stages takes under 1F1B, and how many micro-batches to keep in flight.

A thousand splits can be compared in the time that one is simulated. Every plan that is returned
has been simulated as it is; this only chooses which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import ceil
from operator import add

import numpy as np

from bigbrain_fx.planning.chain import Line, Split
from bigbrain_fx.planning.clock import Message, TimedStages, alternating, forwards, played_s
from bigbrain_fx.planning.cutter import Cutter
from bigbrain_fx.planning.piece_memory import Setting
from bigbrain_fx.planning.stages import Wires, messages
from bigbrain_fx.planning.unit_work import Array, Numbers


def chain_of(line: Line, split: Split, setting: Setting, again: Sequence[int]) -> TimedStages:
    """Return the stages that a split makes; stages `again` run their forward twice.

    A device may have several of them, one after the other, as in a loop or a V.
    """
    own = {name: setting.cluster.device[name].overheads for name in split.sequence}
    number = {name: i for i, name in enumerate(dict.fromkeys(split.sequence))}
    device_of = tuple(number[name] for name in split.sequence)
    forward: list[float] = []
    backward: list[float] = []
    once = dict.fromkeys(device_of, 0.0)
    for stage, (name, a, b) in enumerate(
        zip(split.sequence, split.cuts[:-1], split.cuts[1:], strict=True)
    ):
        until_f, until_b, until_once = line.until(name)
        forward.append(float(until_f[b] - until_f[a]))
        twice_s = forward[-1] if stage in again else 0.0
        backward.append(float(until_b[b] - until_b[a]) + twice_s)
        once[device_of[stage]] += float(until_once[b] - until_once[a])
    stage_of = line.stage_of(split)
    values = line.between(stage_of)
    wires = Wires(setting.cluster, tuple(number))
    there, back = messages(values, line.work, stage_of, device_of, wires)
    return TimedStages(
        device_of,
        tuple(forward),
        tuple(backward) if line.work.trains else (0.0,) * len(forward),
        _merged(there),
        _merged(back),
        {number[name]: each.step_s for name, each in own.items()},
        {number[name]: each.instruction_s for name, each in own.items()},
        once,
    )


def _merged(every: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with those between the same two stages made one: they go one by one."""
    found: dict[tuple[int, int], list[Message]] = {}
    for message in every:
        found.setdefault((message.source, message.target), []).append(message)
    return tuple(
        Message(
            *ends,
            sum(m.nbytes for m in group),
            sum(m.wire_s for m in group),
            max(m.latency_s for m in group),
            sum(m.sent_s for m in group),
            sum(m.received_s for m in group),
        )
        for ends, group in found.items()
    )


def step_s(
    chain: TimedStages, micro_batches: int, in_flight: Sequence[int], trains: bool = True
) -> float:
    """Play a chain through one step of 1F1B and return when its last device is done.

    Args:
        chain: the stages.
        micro_batches: of the step.
        in_flight: of each stage; never more than the stage's before it.
        trains: otherwise there are only forwards.
    """
    if trains and is_plain(chain) and many_at_once(chain, micro_batches, in_flight):
        once_s = np.array([chain.once_s.get(stage, 0.0) for stage in chain.device_of])
        clock = ChainClock(chain, micro_batches, np.array(in_flight, dtype=np.intp))
        return clock.step_s(once_s)
    order = (
        alternating(chain, micro_batches, in_flight) if trains else forwards(chain, micro_batches)
    )
    return played_s(chain, order, trains)


def in_flights(
    chain: TimedStages, micro_batches: int, most: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield how many micro-batches each stage may keep in flight, each choice once.

    The choices are classic 1F1B, as many as fill the pipeline, one more, two more, twice the
    classic, and all. Each hop's time there and back counts in whole cycles of the slowest link.

    Args:
        chain: the stages.
        micro_batches: of a step.
        most: number that each stage's memory can hold.
    """
    count = len(chain.forward_s)
    classic = tuple(range(count, 0, -1))
    fill = _to_fill(chain, micro_batches)
    more = [tuple(n + extra * (n > 1) for n in fill) for extra in (1, 2)]
    twice = tuple(2 * n - 1 for n in classic)
    seen = set()
    for wanted in (classic, fill, *more, twice, (micro_batches,) * count):
        found = falling(wanted, micro_batches, most)
        if found not in seen:
            seen.add(found)
            yield found


def falling(wanted: Sequence[int], micro_batches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers within 1 .. micro_batches and `most`, none larger than the one before."""
    found, before = [], micro_batches
    for want, room in zip(wanted, most, strict=True):
        before = max(1, min(want, room, before))
        found.append(before)
    return tuple(found)


def _to_fill(chain: TimedStages, micro_batches: int) -> tuple[int, ...]:
    loads = list(map(add, *chain.job_s))
    hops = [_hop(chain, stage) for stage in range(len(loads) - 1)]
    cycle_s = max([*loads, *(busy_s for busy_s, _ in hops)])
    if cycle_s <= 0:
        return (micro_batches,) * len(loads)
    each = [
        load + hop for load, hop in zip(loads, [*(trip_s for _, trip_s in hops), 0.0], strict=True)
    ]
    rounds = [max(0, ceil(time_s / cycle_s - 1e-9)) for time_s in each]
    return tuple(max(1, sum(rounds[stage:])) for stage in range(len(rounds)))


def _hop(chain: TimedStages, stage: int) -> tuple[float, float]:
    """Return what a stage and the next send each other: of the busier way, and there and back."""
    there = [m for m in chain.values if (m.source, m.target) == (stage, stage + 1)]
    back = [m for m in chain.gradients if (m.source, m.target) == (stage + 1, stage)]
    wires = [sum(m.wire_s for m in way) for way in (there, back)]
    latency_s = sum(max((m.latency_s for m in way), default=0.0) for way in (there, back))
    handled_s = sum(m.received_s for m in (*there, *back))
    return max(wires), sum(wires) + latency_s + handled_s


# ------------------------------------------------------------------------------------------------
# 1F1B on a chain of stages -> when the last device is done.
#
# The physics, and the bits, are those of `clock.played_s`, which follows one device after
# another. Where many stages compute at once, all of them go in step, in arrays: in a round each
# takes its next job where what it waits for is there, and hundreds of stages take about as long
# as a few.


_FEWEST_JOBS = 16
"""Of a round, about, from which on arrays are faster than following each device."""


class ChainClock:
    """One step of a chain in simulated time: mutable, used once.

    Args:
        stages: one per device, and `is_plain`.
        micro_batches: of the step.
        in_flight: of each stage.
    """

    def __init__(self, stages: TimedStages, micro_batches: int, in_flight: Numbers) -> None:
        count = len(stages.forward_s)
        self.micro_batches = micro_batches
        self.warm_up = np.minimum(in_flight, micro_batches)
        self.now_s = np.array([stages.begin_s[stage] for stage in range(count)])
        self.done = {way: np.zeros(count + 2, dtype=np.intp) for way in (True, False)}
        for way in self.done:  # beside the ends everything is there
            self.done[way][[0, -1]] = micro_batches
        self.job_s = {way: np.array(stages.job_s[way]) for way in (True, False)}
        self.ways = {True: _Way(stages.values, count, micro_batches, 1)}
        self.ways[False] = _Way(stages.gradients, count, micro_batches, -1)

    def step_s(self, once_s: Array) -> float:
        """Return when the last device is done."""
        while self._round():
            pass
        return float((self.now_s + once_s).max())

    def _round(self) -> bool:
        """Let each stage take its next job, where it can; return whether one did."""
        there, back = self.done[True], self.done[False]
        forward, backward = there[1:-1], back[1:-1]
        is_forward = (forward < self.micro_batches) & (forward - backward < self.warm_up)
        forwards = np.flatnonzero(is_forward & (there[:-2] > forward))
        backwards = np.flatnonzero(~is_forward & (back[2:] > backward))
        for way, ready in ((True, forwards), (False, backwards)):
            if len(ready):
                self._take(way, ready)
        return bool(len(forwards) or len(backwards))

    def _take(self, way: bool, ready: Numbers) -> None:
        own, done = self.ways[way], self.done[way]
        micro = done[ready + 1]
        now_s = np.maximum(self.now_s[ready], own.arrived_s[ready, micro]) + own.received_s[ready]
        now_s += self.job_s[way][ready]
        now_s += own.sent_s[ready]
        self.now_s[ready] = now_s
        own.send(ready, micro, now_s)
        done[ready + 1] += 1


class _Way:
    """The messages of one direction: what each stage takes and sends, and when that is there."""

    def __init__(self, every: tuple[Message, ...], count: int, micro: int, step: int) -> None:
        self.step = step
        self.received_s, self.sent_s, self.wire_s, self.latency_s, self.free_s = np.zeros(
            (5, count)
        )
        # one row more: the last of a direction sends nobody anything
        self.arrived_s = np.full((count + 1, micro), -np.inf)
        for message in every:
            self.received_s[message.target] = message.received_s
            self.sent_s[message.source] = message.sent_s
            self.wire_s[message.source] = message.wire_s
            self.latency_s[message.source] = message.latency_s

    def send(self, ready: Numbers, micro: Numbers, now_s: Array) -> None:
        """Send what these stages made: the first and the last of a chain have one neighbour."""
        self.free_s[ready] = np.maximum(now_s, self.free_s[ready]) + self.wire_s[ready]
        targets = ready + self.step  # -1 and the end are the row that nobody reads
        self.arrived_s[targets, micro] = self.free_s[ready] + self.latency_s[ready]


def many_at_once(stages: TimedStages, micro_batches: int, in_flight: Sequence[int]) -> bool:
    """Return whether many stages of a chain compute at once.

    Neighbours with equally many micro-batches in flight do not compute at once. A forward goes
    through all of them before any of them begins its next backward. With few in flight, stages
    do not compute at once either. A micro-batch then stays at a stage for two rounds of each stage
    from there on.
    """
    count = len(stages.forward_s)
    if count < _FEWEST_JOBS:
        return False
    alike = max((len(list(run)) for n, run in groupby(in_flight) if n < micro_batches), default=1)
    waits = (2 * (count - s) * micro_batches / n for s, n in enumerate(in_flight))
    rounds = max(2 * (count + micro_batches), 2 * alike * micro_batches, *waits)
    return 2 * count * micro_batches >= _FEWEST_JOBS * rounds


def is_plain(stages: TimedStages) -> bool:
    """Whether each stage is on a device of its own and neighbours send each other one message."""
    hops = [(stage, stage + 1) for stage in range(len(stages.forward_s) - 1)]
    there = [(message.source, message.target) for message in stages.values]
    back = [(message.target, message.source) for message in stages.gradients]
    return (
        stages.device_of == tuple(range(len(hops) + 1))
        and sorted(there) == hops
        and sorted(back) == hops
    )


# ------------------------------------------------------------------------------------------------
# A split, played through as it is -> a better one: cuts are shifted while a step gets shorter.
#
# What the dynamic program minimises is not quite what a step takes; from its best splits on, the
# clock decides.


@dataclass(frozen=True)
class Found:
    """A split, how many micro-batches to keep in flight, and about what a step would take."""

    line: Line
    split: Split
    micro_batches: int
    in_flight: tuple[int, ...]
    recompute: tuple[int, ...]
    step_s: float


def polished(cutter: Cutter, found: Found, visits: int) -> Found:
    """Shift the cuts, one at a time, by ever smaller steps, while the pace improves.

    Args:
        cutter: of the found split's line and setting.
        found: where to begin.
        visits: forwards and backwards that may be played, and units that may be looked at.
    """
    line = found.line
    best, left = found, visits
    each = 2 * len(found.split.sequence) * found.micro_batches + 2 * line.work.count
    step = max(1, line.count // (4 * len(found.split.sequence)))
    while step >= 1 and left > each:
        improved = False
        for cuts in shifted_cuts(best.split.cuts, step):
            left -= each
            other = _repaced(cutter, best, cuts) if left > 0 else None
            if other is not None and other.step_s < best.step_s * (1 - 1e-7):
                best, improved = other, True
                break
        step = step if improved else step // 2
    return best


def shifted_cuts(cuts: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them, or all from one on, moved by a step either way."""
    for change in (-step, step):
        for i in range(1, len(cuts) - 1):
            for upto in dict.fromkeys((i + 1, len(cuts) - 1)):
                moved = (*cuts[:i], *(c + change for c in cuts[i:upto]), *cuts[upto:])
                if all(a < b for a, b in pairwise(moved)):
                    yield moved


def _repaced(cutter: Cutter, found: Found, cuts: tuple[int, ...]) -> Found | None:
    """Return what was found with other cuts; None when a stage would not fit."""
    line, setting = found.line, cutter.setting
    sequence = found.split.sequence
    if not cutter.fits(sequence, cuts):
        return None
    split = cutter.measure(sequence, cuts)
    chain = chain_of(line, split, setting, found.recompute)
    room = room_of(line, setting, split, found.recompute)
    in_flight = falling(found.in_flight, found.micro_batches, room)
    trains = line.work.trains
    paced_s = step_s(chain, found.micro_batches, in_flight, trains)
    return replace(found, split=split, in_flight=in_flight, step_s=paced_s)


def room_of(line: Line, setting: Setting, split: Split, again: Sequence[int]) -> list[int]:
    """Return how many micro-batches each stage's memory can hold."""
    pieces = zip(split.sequence, split.cuts[:-1], split.cuts[1:], strict=True)
    return [
        line.memory.most_in_flight(device, a, b, setting, stage in again)
        for stage, (device, a, b) in enumerate(pieces)
    ]
