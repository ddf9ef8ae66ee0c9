"""For how long plain runs are tried, in seconds of this thread: who else computes must not matter.

A call that sleeps or waits for data has no seconds of its own: the clock is a bound, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_BUSY = 5  # times as long on the clock, where others use the processors or a call waits


def budget(most_s: float) -> Callable[[], bool]:
    """Return what says whether so many seconds of this thread are over, from now on."""
    own_s, end_s = time.thread_time() + most_s, time.perf_counter() + _BUSY * most_s
    return lambda: time.thread_time() > own_s or time.perf_counter() > end_s
