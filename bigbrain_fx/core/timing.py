"""Seconds of a command by part, on the clock and of processors.

Of a part that another process does, that one says what its processor time is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """One part of a command.

    Attributes:
        part: what was done, in a word or two.
        wall_s: seconds on the clock.
        processor_s: seconds of processors.
    """

    part: str
    wall_s: float
    processor_s: float


class Stopwatch:
    """Laps of this process, the first of which begins where the process did.

    Args:
        with_children: count processor seconds of its children, too, once they have ended.
    """

    def __init__(self, *, with_children: bool = False) -> None:
        self._counted = 4 if with_children else 2
        self._wall_s, self._processor_s = time.monotonic() - _age_s(), 0.0

    def lap(self, part: str) -> Timing:
        """Return what was done since the last lap."""
        wall_s, processor_s = time.monotonic(), sum(os.times()[: self._counted])
        found = Timing(part, wall_s - self._wall_s, processor_s - self._processor_s)
        self._wall_s, self._processor_s = wall_s, processor_s
        return found


def _age_s() -> float:
    """Return for how many seconds this process has run; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            begun_ticks = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, up_s - begun_ticks / os.sysconf("SC_CLK_TCK"))
