"""Local search over the orders of a pipeline: one job moves, what is no slower is kept.

Work is counted in jobs that were played, never timed, so that equal input gives equal orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from bigbrain_fx.planning.order_clock import OrderClock

Coded: TypeAlias = list[list[int]]
"""The orders of all devices, jobs as numbers: see `OrderClock`."""

Score: TypeAlias = tuple[float, ...]

_FAR = (1, 1, 2, 3, 5, 8)
_PATIENCE = 1500
"""Tries without a better order, after which the search goes back to the best."""
_WORSE = 0.002
"""What one try in a hundred may lose."""


def scorer(clock: OrderClock, in_row: bool) -> Callable[[Coded], Score]:
    """Return what is least of the best order.

    Args:
        clock: of the pipeline.
        in_row: seconds of one more step in a row, and those of a step alone decide among equals;
            else of a step alone, and nothing else.
    """
    if in_row:
        return clock.row_s
    return lambda orders: (clock.step_s(orders),)


def climbed(
    clock: OrderClock, orders: Coded, score: Callable[[Coded], Score], jobs: int
) -> tuple[Score, Coded]:
    """Move one job of one device at a time; return the best order that has room, and its score."""
    dice = random.Random(0)
    most = clock.played + jobs
    best = now = score(orders), orders
    since = 0
    while clock.played < most:
        clock.played += 1  # a try that is not played is work, too: the search ends
        found = _tried(clock, now[1], dice)
        if found is None:
            continue
        judged = score(found)
        allowed = now[0] if dice.random() > 0.01 else _loosened(now[0], best[0])
        if judged <= allowed:
            now = judged, found
        since += 1
        if judged < best[0]:
            best, since = (judged, found), 0
        elif since > _PATIENCE:
            now, since = best, 0
    return best


def _loosened(score: Score, best: Score) -> Score:
    return (score[0] + _WORSE * best[0], float("inf"))[: len(score)]


def _tried(clock: OrderClock, orders: Coded, dice: random.Random) -> Coded | None:
    """Move a job of a device some places, as far as it may go; None where it may not."""
    device = dice.randrange(len(orders))
    jobs = list(orders[device])
    place = start = dice.randrange(len(jobs))
    step = dice.choice((-1, 1))
    for _ in range(dice.choice(_FAR)):
        other = place + step
        if not (0 <= other < len(jobs) and _may_swap(clock, jobs, min(place, other))):
            break
        jobs[place], jobs[other] = jobs[other], jobs[place]
        place = other
    if place == start or not clock.fits(device, jobs):
        return None
    found = list(orders)
    found[device] = jobs
    return found


def _may_swap(clock: OrderClock, jobs: Sequence[int], at: int) -> bool:
    """Whether two neighbours may change places.

    Of a stage, micro-batches ascend, and a micro-batch's Forward, Backward, BackwardWeight are in
    this order; what one stage hands to another of the same device comes first, too.
    """
    a, b = jobs[at], jobs[at + 1]
    same_kind, same_micro = clock.kind[a] == clock.kind[b], clock.micro[a] == clock.micro[b]
    if clock.stage[a] == clock.stage[b]:
        return not (same_kind or same_micro)
    handed = clock.kind[a], clock.stage[a], clock.stage[b]
    return not (same_kind and same_micro and handed in clock.stages.local)
