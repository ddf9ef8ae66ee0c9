"""Where to cut a line of units for devices that come again: work shared by speed, then moved.

What a cut is worth is judged from outside: a V wants other cuts than one piece a device does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

Cuts: TypeAlias = tuple[int, ...]
"""Numbers of the units at which a piece begins, but for the first one."""


def shared_cuts(
    work: Sequence[float], device_of: Sequence[int], speed: Sequence[float] | None = None
) -> Cuts:
    """Cut a line so that devices have work in proportion to their speed, in equal pieces.

    Args:
        work: of each unit, in order; at least as many units as pieces.
        device_of: of each piece.
        speed: of each device; all alike where it is left out.
    """
    share = [
        (1.0 if speed is None else speed[device]) / device_of.count(device) for device in device_of
    ]
    total, every = sum(work) or 1.0, sum(share)
    ends = [part / every for part in accumulate(share)][:-1]
    reached = [done / total for done in accumulate(work)]
    cuts = [1 + min(range(len(work)), key=lambda i: abs(reached[i] - end)) for end in ends]
    return _apart(cuts, len(work))


def _apart(cuts: Sequence[int], units: int) -> Cuts:
    """Leave every piece a unit."""
    found = list(cuts)
    for i, cut in enumerate(found):
        found[i] = max(cut, i + 1, found[i - 1] + 1 if i else 1)
    for i in reversed(range(len(found))):
        found[i] = min(found[i], units - (len(found) - i))
    return tuple(found)


def searched_cuts(
    start: Cuts, units: int, judge: Callable[[Cuts], float], tries: int
) -> tuple[float, Cuts]:
    """Move cuts while that is better; return what the best is worth, and the best. Seeded.

    Args:
        start: where to start.
        units: how many there are.
        judge: seconds of a cut; infinity for one that cannot be.
        tries: cuts to judge, at most.
    """
    dice = random.Random(0)
    known = {start: judge(start)}
    best = start
    for _ in range(4 * tries):  # most of what is drawn late is known
        if len(known) > tries or not start:
            break
        cuts = list(best)
        for _ in range(dice.choice((1, 1, 2, 3))):
            cuts[dice.randrange(len(cuts))] += dice.choice((-1, 1, -2, 2))
        tried = tuple(cuts)
        if tried in known or any(a >= b for a, b in pairwise((0, *tried, units))):
            continue
        known[tried] = judge(tried)
        if known[tried] <= known[best]:
            best = tried
    return known[best], best
