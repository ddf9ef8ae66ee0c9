"""What is known of a process's progress, and the clock that it is judged by.

While this process is stopped (Ctrl-Z, SIGSTOP) or starved, what others said was not heard, so no
deadline may have passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from .protocol import Wait


@dataclass
class Pulse:
    """What is known of a process's progress; times are of a monotonic clock, in seconds.

    Attributes:
        heard: when it last said anything: a stopped process says nothing.
        moved: when its main thread last began an instruction.
        instruction: the number of that.
        waits_for: what it waits for; None while it computes.
        is_at_work: whether it runs steps: before and after that no progress is expected.
        starved_s: how long it has had no processor, though ready to run, since it moved.
    """

    heard: float
    moved: float
    instruction: int = -1
    waits_for: Wait | None = None
    is_at_work: bool = False
    starved_s: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether it is up to this process alone that something happens."""
        return self.is_at_work and self.waits_for is None

    def beat(self, now: float, instruction: int, waits_for: Wait | None) -> None:
        """Take note of a heartbeat."""
        if instruction != self.instruction or waits_for != self.waits_for:
            self.moved, self.starved_s = now, 0.0
        self.heard, self.instruction, self.waits_for = now, instruction, waits_for

    def excuse(self, seconds: float, now: float) -> None:
        """Take no account of time in which it had no processor."""
        self.starved_s += seconds
        self.heard = min(now, self.heard + seconds)
        self.moved = min(now, self.moved + seconds)


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
