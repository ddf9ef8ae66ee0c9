"""Whether processes and this host make progress: who hangs, who had no processor, who slept.

Devices that wait for a hung one make no progress either; ending them would help nobody. A busy host
is no fault of a process. While this one is stopped (Ctrl-Z, SIGSTOP) or starved, what others said
was not heard, so no deadline may have passed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .protocol import BATCH, Wait

SLOW_SHARE = 0.25  # of the limit: a device this long within one instruction is called slow


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


def hung(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices to end: silent ones, and those within one instruction for too long."""
    return [
        name
        for name, pulse in pulses.items()
        if now - pulse.heard > limit_s or (pulse.computes and now - pulse.moved > limit_s)
    ]


def locked(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> bool:
    """Whether all wait for each other: a message was lost. Who rests waits for the caller."""
    rests = any(p.waits_for and p.waits_for.kind == BATCH for p in pulses.values())
    return (
        bool(pulses)
        and not rests
        and all(
            pulse.waits_for is not None and pulse.is_at_work and now - pulse.moved > limit_s
            for pulse in pulses.values()
        )
    )


def slow(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices that others wait for, and that have long been in one instruction."""
    waited_for = {pulse.waits_for.device for pulse in pulses.values() if pulse.waits_for}
    return [
        name
        for name, pulse in pulses.items()
        if name in waited_for and pulse.computes and now - pulse.moved > SLOW_SHARE * limit_s
    ]


NS_PER_S = 1e9


class Starves(Protocol):
    """Tells of one process."""

    def look(self) -> float:
        """Return the seconds in which it could have run and did not, in all."""
        ...

    def is_stopped(self) -> bool:
        """Return whether it is known to be stopped (SIGSTOP): it does not run until it is told."""
        ...


class ToldStarving:
    """What another host says of a process there."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def look(self) -> float:
        """Return what was said last."""
        return self.total_s

    def is_stopped(self) -> bool:
        """Return false: nothing is said of that."""
        return False


class Starving:
    """How long the threads of a process have waited for a processor (Linux; elsewhere: never).

    Args:
        pid: of a process on this host.
        tasks: where the kernel tells of its threads.
    """

    def __init__(self, pid: int, tasks: Path | None = None) -> None:
        self.tasks = Path(f"/proc/{pid}/task") if tasks is None else tasks
        self.waited_ns: dict[str, int] = {}
        self.total_s = 0.0

    def look(self) -> float:
        """Return the seconds in all; of threads that wait at a time only the longest counts."""
        before, self.waited_ns = self.waited_ns, _waited_ns(self.tasks)
        more = (ns - before.get(thread, 0) for thread, ns in self.waited_ns.items())
        self.total_s += max(more, default=0) / NS_PER_S
        return self.total_s

    def is_stopped(self) -> bool:
        """Return whether all of its threads are stopped; a debugger's are not meant."""
        with suppress(OSError, IndexError):
            told = [(thread / "stat").read_text() for thread in self.tasks.iterdir()]
            return {text.rpartition(")")[2].split()[0] for text in told} == {"T"}
        return False


def _waited_ns(tasks: Path) -> dict[str, int]:
    """Return by thread what it has waited, its second field; those that end meanwhile are none."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for thread in list(tasks.iterdir()):
            with suppress(OSError, ValueError, IndexError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return found


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
