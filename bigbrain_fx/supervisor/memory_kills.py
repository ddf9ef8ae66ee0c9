"""Deaths that came as memory ran out, of which the kernel says SIGKILL alone.

It counts such deaths of the whole host: a SIGKILL just after a rise is taken for one of them.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

COUNTS = Path("/proc/vmstat")
EVERY_S = 1.0
WITHIN_S = 3.0


class MemoryKills:
    """Watch the count. `look` as often as something happens, `meant` at a death.

    Args:
        counts: the file with a line "oom_kill N".
    """

    def __init__(self, counts: Path = COUNTS) -> None:
        self.counts = counts
        self.count, self.looked, self.risen = _count(counts), 0.0, -WITHIN_S - 1.0

    def look(self, now: float) -> None:
        """Note a rise, if it is time to look."""
        if now - self.looked >= EVERY_S:
            self._look(now)

    def meant(self, code: int, now: float) -> bool:
        """Whether a process that ended with this code was ended for want of memory."""
        if code != -signal.SIGKILL:
            return False
        self._look(now)
        return now - self.risen <= WITHIN_S

    def _look(self, now: float) -> None:
        count, self.looked = _count(self.counts), now
        if count > self.count:
            self.count, self.risen = count, now


def _count(path: Path) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
