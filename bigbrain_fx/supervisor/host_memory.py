"""How much memory is left: of this host, and of the control groups that this process is in.

A container, a batch system and systemd set limits of their own, which /proc/meminfo leaves out. The
kernel ends a process that takes more, with no message but SIGKILL.
`MemoryKills` counts such deaths of the whole host: a SIGKILL just after a rise is one of them.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_SIZES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_CACHED = ("inactive_file", "total_inactive_file")  # of files; given back when asked for


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that can still be taken; where nothing says, one gigabyte."""
    left = left_bytes(root)
    return 1 << 30 if left == math.inf else int(left)


def left_bytes(root: Path = ROOT) -> float:
    """Return the memory that can still be taken; where nothing says, infinity.

    Args:
        root: where /proc and /sys are; tests bring their own.
    """
    return max(0.0, min((host_bytes(root), *map(_left, group_folders(root, "memory")))))


def host_bytes(root: Path = ROOT) -> float:
    """Return what the whole host has left, without swapping; infinity where it does not say."""
    return _row(root / "proc/meminfo", "MemAvailable:") * 1024


def group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of the groups around it.

    In a container the path in /proc/self/cgroup may be the host's, and not exist here: then the
    mount's own root is what applies.
    """
    base = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controllers if controllers else base
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield folder
            folder = folder.parent
        yield mount
    yield from (base, base / controller)


def number_in(path: Path) -> float:
    """Return the positive number in a file; infinity for none, for "max" and for -1."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() and int(text) > 0 else math.inf


def text_of(path: Path) -> str:
    """Return what a file of the kernel's says; "" where this kernel, or container, has none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _left(group: Path) -> float:
    """Return what a control group may still take; its files' pages go when there is need."""
    for limit, used in _SIZES:  # version 2, version 1
        most, taken = number_in(group / limit), number_in(group / used)
        if most < math.inf and taken < math.inf:
            cached = min(_row(group / "memory.stat", name) for name in _CACHED)
            return most - taken + (cached if cached < math.inf else 0)
    return math.inf


def _row(path: Path, name: str) -> float:
    """Return the number in a row of a file that begins with a name; infinity where it has none."""
    for line in text_of(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1:2] and words[1].isdigit():
            return int(words[1])
    return math.inf


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
