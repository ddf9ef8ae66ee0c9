"""For how long plain runs are tried, in seconds of this thread: who else computes must not matter.

A look that goes by the clock makes fewer calls on a busy machine, and takes a model for steady
that is not. So does one that goes by seconds on a slow machine: they are seconds of a usual one,
by a loop that is timed once. A call that sleeps or waits for data has no seconds of its own: the
clock is a bound.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

_BUSY = 5  # times as long on the clock, where others use the processors or a call waits
_ROUNDS, _ROUND_S = 20_000, 20e-9  # of the loop, and what one takes on a processor of 2020
_SLOWEST = 10.0


def budget(most_s: float) -> Callable[[], bool]:
    """Return what says whether so many seconds of a usual machine are over, from now on."""
    most_s *= slowness()
    own_s, end_s = time.thread_time() + most_s, time.perf_counter() + _BUSY * most_s
    return lambda: time.thread_time() > own_s or time.perf_counter() > end_s


@functools.cache
def slowness() -> float:
    """Return how many times as long as a usual machine this one computes Python, 1 to 10."""
    taken_s = min(_loop_s() for _ in range(3))
    return min(max(1.0, taken_s / (_ROUNDS * _ROUND_S)), _SLOWEST)


def _loop_s() -> float:
    start_s, total = time.thread_time(), 0
    for number in range(_ROUNDS):
        total += number
    return time.thread_time() - start_s
