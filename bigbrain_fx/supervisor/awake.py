"""A clock that stands still while this process is stopped (Ctrl-Z, SIGSTOP) or starved.

What others said meanwhile was not heard, so no deadline may have passed.
"""

from __future__ import annotations

import time

LEAST_GAP_S = 0.5


class AwakeClock:
    """Tell the time on a monotonic clock, in seconds; whoever lives by it looks at an even pace.

    Args:
        pace_s: the longest time from one look to the next. Where two are much further apart, this
            process did not run in between, and only `pace_s` of that counts.
    """

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.most_s = max(2 * pace_s, LEAST_GAP_S)
        self.looked = time.monotonic()
        self.left_out_s = 0.0

    def now(self) -> float:
        """Return the time; signal handlers may call this."""
        looked, self.looked = self.looked, time.monotonic()
        gap_s = self.looked - looked
        if gap_s > self.most_s:
            self.left_out_s += gap_s - self.pace_s
        return self.looked - self.left_out_s
