"""Periodic orders: a job of micro-batch m goes at offset + m * period; three offsets a stage.

Few numbers say everything, whatever the number of micro-batches: what a device runs is a warm-up,
one loop and a wind-down, short enough to be read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from bigbrain_fx.planning.order_bound import period_s, taken_s
from bigbrain_fx.planning.order_clock import OrderClock
from bigbrain_fx.planning.order_search import Coded, Score
from bigbrain_fx.planning.virtual_stages import JobOf, Kind, OrdersOf, VirtualStages

Offsets: TypeAlias = dict[tuple[int, int], float]
"""Seconds by (kind, stage)."""

_NUDGE = 1e-3


@dataclass(frozen=True)
class Periodic:
    """Offsets of what each stage computes, and after what the next micro-batch follows."""

    offset_s: Mapping[tuple[int, int], float]
    period_s: float

    def orders(self, stages: VirtualStages) -> OrdersOf:
        """Return each device's jobs in order of time; of one time, as a micro-batch has them."""
        found: dict[int, list[tuple[float, int, JobOf]]] = {d: [] for d in stages.timed.devices}
        for (kind, stage), offset_s in self.offset_s.items():
            device, place = stages.timed.device_of[stage], _place(stages, kind, stage)
            found[device] += [
                (offset_s + micro * self.period_s, place, (kind, stage, micro))
                for micro in range(stages.micro_batches)
            ]
        return {device: tuple(job for _, _, job in sorted(jobs)) for device, jobs in found.items()}


def _place(stages: VirtualStages, kind: int, stage: int) -> int:
    """Return the place of a job among those of a micro-batch: there, back, then the weights."""
    if kind == Kind.FORWARD:
        return stage
    back = 2 * stages.count - stage
    return back + stages.count if kind == Kind.BACKWARD_WEIGHT else back


def as_soon_as_possible(stages: VirtualStages, stretch: float = 1.0) -> Periodic:
    """Return offsets at which no two jobs of a device overlap, where gaps allow that.

    The jobs of one micro-batch are placed one after another, each as soon as what it waits for is
    there and its device has a gap in every period; BackwardWeights come last, into what is left.

    Args:
        stages: the pipeline.
        stretch: how much longer a period is than it has to be: gaps are found more easily.

    Source: Rau, Iterative Modulo Scheduling, 1994, without its backtracking.
    """
    table = _Table(stages, period_s(stages) * stretch)
    ways = (Kind.FORWARD, stages.timed.values), (Kind.BACKWARD, stages.timed.gradients)
    for kind, messages in ways:
        order = range(stages.count) if kind == Kind.FORWARD else reversed(range(stages.count))
        for stage in order:
            own = [table.end_s(Kind.FORWARD, stage)] if kind == Kind.BACKWARD else [0.0]
            own += [
                table.end_s(kind, message.source) + message.way_s
                for message in messages
                if message.target == stage
            ]
            table.place(kind, stage, max(own))
    for stage in reversed(range(stages.count)):
        table.place(Kind.BACKWARD_WEIGHT, stage, table.end_s(Kind.BACKWARD, stage))
    return Periodic(table.offset_s, table.period_s)


class _Table:
    """When each device is taken, in every period: mutable."""

    def __init__(self, stages: VirtualStages, length_s: float) -> None:
        self._stages, self.period_s = stages, length_s
        self.offset_s: Offsets = {}
        self._taken: dict[int, list[tuple[float, float]]] = {d: [] for d in stages.timed.devices}

    def end_s(self, kind: Kind, stage: int) -> float:
        """Return when a job has ended; 0 for what is not computed."""
        if (kind, stage) not in self.offset_s:
            return 0.0
        return self.offset_s[kind, stage] + taken_s(self._stages, kind, stage)

    def place(self, kind: Kind, stage: int, ready_s: float) -> None:
        """Put a job into the first gap that holds it; where there is none, at once."""
        if kind not in self._stages.kinds(stage):
            return
        if self.period_s <= 0.0:  # nothing takes any time
            self.offset_s[kind, stage] = ready_s
            return
        taken = self._taken[self._stages.timed.device_of[stage]]
        length_s = taken_s(self._stages, kind, stage)
        ends = ((start + length - ready_s) % self.period_s + ready_s for start, length in taken)
        tries = sorted([ready_s, *ends])
        at_s = next((t for t in tries if self._is_free(taken, t, length_s)), ready_s)
        self.offset_s[kind, stage] = at_s
        taken.append((at_s, length_s))

    def _is_free(self, taken: Sequence[tuple[float, float]], at_s: float, length_s: float) -> bool:
        slack = self.period_s * 1e-9
        return all(
            (start - at_s) % self.period_s >= length_s - slack
            and ((at_s - start) % self.period_s >= length - slack or length <= slack)
            for start, length in taken
        )


def from_orders(stages: VirtualStages, orders: Mapping[int, Sequence[JobOf]]) -> Periodic:
    """Return offsets near an order of any kind: where its middle micro-batch goes.

    What a device does counts in shares of what it does for one micro-batch, waiting left out: only
    how its own jobs follow each other is an order.
    """
    middle, every_s = stages.micro_batches // 2, period_s(stages)
    at: Offsets = {}
    for jobs in orders.values():
        each_s = every_s * stages.micro_batches / max(1, len(jobs))
        for place, (kind, stage, micro) in enumerate(jobs):
            if micro == middle:
                at[kind, stage] = place * each_s
    return Periodic(at, every_s)


def searched(
    clock: OrderClock, starts: Sequence[Periodic], score: Callable[[Coded], Score], jobs: int
) -> tuple[Score, Periodic]:
    """Move offsets; return the best that has room and does not block, and its score.

    Args:
        clock: of the pipeline.
        starts: where to start; the best of them is gone on with.
        score: to make small; infinity where nothing has room.
        jobs: about how many to play.
    """
    dice = random.Random(0)
    most = clock.played + jobs

    def judged(tried: Periodic) -> Score:
        orders = tried.orders(clock.stages)
        coded = clock.numbered(orders)
        clock.played += clock.count  # to sort them is work, too
        if not (_is_legal(clock.stages, tried) and clock.all_fit(coded)):
            peaks = clock.stages.peaks(orders)
            room = clock.stages.memory_bytes
            over = sum(max(0.0, peaks[d] - room.get(d, float("inf"))) for d in peaks)
            return (float("inf"), over)
        found = score(coded)
        return found if found[0] < float("inf") else (float("inf"), float("inf"))

    now = best = min(((judged(start), start) for start in starts), key=lambda each: each[0])
    while clock.played < most:
        tried = Periodic(_moved(now[1], dice), now[1].period_s)
        found = judged(tried)
        if found <= (now[0] if dice.random() > 0.02 else (now[0][0] * 1.01, float("inf"))):
            now = found, tried
        if found < best[0]:
            best = now = found, tried
    return best


def _moved(periodic: Periodic, dice: random.Random) -> Offsets:
    """Move one offset, everything after one, or put one beside another."""
    at, period_s = dict(periodic.offset_s), periodic.period_s
    keys = list(at)
    key, draw = dice.choice(keys), dice.random()
    if draw < 0.5:
        at[key] += dice.uniform(-1, 1) * period_s
    elif draw < 0.8:
        by_s, start_s = dice.uniform(-0.7, 0.7) * period_s, at[key]
        at = {each: when + by_s if when >= start_s else when for each, when in at.items()}
    else:
        at[key] = at[dice.choice(keys)] + dice.choice((-1, 1)) * _NUDGE * period_s
    return at


def _is_legal(stages: VirtualStages, periodic: Periodic) -> bool:
    """Whether a micro-batch's jobs that hand on to each other on a device are in their order."""
    at = periodic.offset_s
    for stage in range(stages.count):
        own = [(at[kind, stage], kind) for kind in stages.kinds(stage)]
        if any(a > b for (a, _), (b, _) in pairwise(own)):
            return False
    return all(
        at[kind, source] <= at[kind, target]
        for kind, source, target in stages.local
        if (kind, source) in at and (kind, target) in at
    )
