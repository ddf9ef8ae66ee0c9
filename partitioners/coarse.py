"""Many units -> fewer: neighbours become one, except where little crosses between them.

It knows bytes; it knows no times and no method.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from bigbrain_fx.planning import Work


def quiet_cuts(known: Work, most: int) -> list[int]:
    """Return the places to cut the units, in their order, into at most `most` runs.

    One in each of `most` equal parts, where the fewest bytes cross; 0 and the end are included.
    """
    count = len(known.groups)
    if count <= most:
        return list(range(count + 1))
    crossing = [0] * (count + 1)
    for value in known.values:
        crossing[value.maker + 1] += value.nbytes
        crossing[value.readers[-1] + 1] -= value.nbytes
    total, at_cut = 0, []
    for change in crossing:
        total += change
        at_cut.append(total)
    parts = pairwise(round(i * count / most) for i in range(most + 1))
    inner = {min(range(a + 1, b + 1), key=at_cut.__getitem__) for a, b in parts}
    return sorted({0, count, *inner})


def blocks(cuts: Iterable[int]) -> list[range]:
    """Return the runs between cuts."""
    return [range(a, b) for a, b in pairwise(cuts)]
