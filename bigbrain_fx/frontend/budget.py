"""Time budget of plain runs, in processor seconds of this thread.

A call that sleeps or waits for data uses no processor time: the clock is a bound, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_BUSY = 5  # times as long on the clock, where others use the processors or a call waits


def budget(most_s: float) -> Callable[[], bool]:
    """Return a function that is true once `most_s` seconds of this thread are over."""
    own_s, end_s = time.thread_time() + most_s, time.perf_counter() + _BUSY * most_s
    return lambda: time.thread_time() > own_s or time.perf_counter() > end_s
