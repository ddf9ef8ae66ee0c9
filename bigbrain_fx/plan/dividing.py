"""Several jobs -> who gets which devices: the division whose last job ends first.

    prices ──every division, or steps from one to the next──▶ Divided

A job's price is asked for with its own devices and with those of the others, who may slow it. This
file knows names of devices and seconds; it knows no models, plans or memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import interchangeable

Names: TypeAlias = tuple[str, ...]
Price: TypeAlias = Callable[[int, Names, tuple[Names, ...]], float]
"""(job, its devices, those of each other job) -> seconds until it ends; infinity: does not fit."""
MOST_DIVISIONS = 4000
_Counts: TypeAlias = tuple[tuple[int, ...], ...]  # job -> of each kind of device, how many


@dataclass(frozen=True)
class Divided:
    """Devices of each job, and the end of each job; `ends_s` has infinity for jobs that do not fit.

    `is_exact` says that every division was compared, or an equivalent one.
    """

    given: tuple[Names, ...]
    ends_s: tuple[float, ...]
    is_exact: bool
    looked_at: int

    @property
    def fits(self) -> bool:
        """Whether all jobs fit together."""
        return all(map(math.isfinite, self.ends_s))


def divide(cluster: Cluster, jobs: int, price: Price, most_prices: int) -> Divided:
    """Find the division whose last job ends first; of equals, the one with the least sum.

    Every division is compared where that takes no more than `most_prices` prices. Otherwise each
    device goes to the job that ends last; then devices move and swap as long as that helps.
    """
    kinds = interchangeable(cluster)
    if _prices(kinds, jobs) <= most_prices and _divisions(kinds, jobs) <= MOST_DIVISIONS:
        return _best_of_all(kinds, jobs, price)
    return _climbed(kinds, jobs, price, most_prices)


def _divisions(kinds: Sequence[Names], jobs: int) -> int:
    return math.prod(math.comb(len(kind) + jobs, jobs) for kind in kinds)


def _prices(kinds: Sequence[Names], jobs: int) -> int:
    return jobs * (math.prod(len(kind) + 1 for kind in kinds) - 1)


# --------------------------------------------------------------------------- looking at all


def _best_of_all(kinds: Sequence[Names], jobs: int, price: Price) -> Divided:
    every = [_ended(kinds, counts, price) for counts in _every(kinds, jobs)]
    best = min(every, key=_rank)
    return Divided(best.given, best.ends_s, True, len(every))


def _every(kinds: Sequence[Names], jobs: int) -> Iterator[_Counts]:
    """Yield every division by counts; each job has a device at least."""
    per_kind = [list(_shared(len(kind), jobs)) for kind in kinds]
    for chosen in product(*per_kind):
        counts = tuple(zip(*chosen, strict=True))
        if all(map(any, counts)):
            yield counts


def _shared(count: int, jobs: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to give up to `count` equal things to so many."""
    if jobs == 0:
        yield ()
        return
    for first in range(count + 1):
        for rest in _shared(count - first, jobs - 1):
            yield (first, *rest)


def named(kinds: Sequence[Names], counts: _Counts) -> tuple[Names, ...]:
    """Return the devices of each job: of every kind the first, then those after them."""
    given: list[list[str]] = [[] for _ in counts]
    for number, kind in enumerate(kinds):
        taken = 0
        for job, own in enumerate(counts):
            given[job] += kind[taken : taken + own[number]]
            taken += own[number]
    return tuple(map(tuple, given))


def _ended(kinds: Sequence[Names], counts: _Counts, price: Price) -> Divided:
    given = named(kinds, counts)
    ends = tuple(
        price(job, own, given[:job] + given[job + 1 :]) if own else math.inf
        for job, own in enumerate(given)
    )
    return Divided(given, ends, False, 1)


def _rank(found: Divided) -> tuple[float, float, float, int]:
    """Order divisions: what fits first, then the last end, the sum of ends, the fewest devices."""
    ends = [end for end in found.ends_s if math.isfinite(end)]
    lacking = len(found.ends_s) - len(ends)
    used = sum(map(len, found.given))
    return lacking, max(ends, default=0.0), sum(ends), used


# --------------------------------------------------------------------------- a step at a time


def _climbed(kinds: Sequence[Names], jobs: int, price: Price, most_prices: int) -> Divided:
    """Deal, then move and swap; stop when nothing helps, or when the prices are spent."""
    asked: dict[tuple[int, Names, tuple[Names, ...]], float] = {}

    def known(job: int, own: Names, others: tuple[Names, ...]) -> float:
        key = job, own, others
        if key not in asked:
            asked[key] = price(*key)
        return asked[key]

    counts, best, looked_at = _dealt(kinds, jobs, known)
    improved = True
    while improved and len(asked) < most_prices:
        improved = False
        for step in _steps(kinds, counts):
            found = _ended(kinds, step, known)
            looked_at += 1
            if _rank(found) < _rank(best):
                counts, best, improved = step, found, True
                break
            if len(asked) >= most_prices:
                break
    return Divided(best.given, best.ends_s, False, looked_at)


def _dealt(kinds: Sequence[Names], jobs: int, price: Price) -> tuple[_Counts, Divided, int]:
    """Give each device in turn to a job that does not fit yet, else to that which ends last."""
    counts: _Counts = tuple((0,) * len(kinds) for _ in range(jobs))
    found, looked_at = _ended(kinds, counts, price), 0
    for number, kind in enumerate(kinds):
        for _ in kind:
            ends = found.ends_s
            poorest = max(range(jobs), key=lambda job: (ends[job], -sum(counts[job])))
            counts = _moved(counts, (poorest, number, 1))
            found, looked_at = _ended(kinds, counts, price), looked_at + 1
    return counts, found, looked_at


def _steps(kinds: Sequence[Names], counts: _Counts) -> Iterator[_Counts]:
    """Yield what one device more, moved, or exchanged for another gives."""
    jobs, numbers = range(len(counts)), range(len(kinds))
    idle = [len(kind) - sum(own[n] for own in counts) for n, kind in enumerate(kinds)]
    for n in numbers:
        for a in jobs:
            if idle[n]:
                yield _moved(counts, (a, n, 1))
            if counts[a][n] and sum(counts[a]) > 1:
                yield _moved(counts, (a, n, -1))
            for b in jobs:
                if a != b and counts[a][n] and sum(counts[a]) > 1:
                    yield _moved(counts, (a, n, -1), (b, n, 1))
    for n, m, a, b in product(numbers, numbers, jobs, jobs):
        if n != m and a < b and counts[a][n] and counts[b][m]:
            yield _moved(counts, (a, n, -1), (b, n, 1), (b, m, -1), (a, m, 1))


def _moved(counts: _Counts, *changes: tuple[int, int, int]) -> _Counts:
    found = [list(own) for own in counts]
    for job, number, more in changes:
        found[job][number] += more
    return tuple(map(tuple, found))
