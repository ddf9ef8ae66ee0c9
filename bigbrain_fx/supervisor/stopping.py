"""A run that ends on request: all devices before the same step, which none of them has begun.

`Stopping` is how far the request has come; `Ending` carries it through, and finds who is late.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from .catch_up import ToldSteps
from .crew import Crew
from .job import FailedError, Job
from .judging import Failure
from .processes import Member
from .protocol import DISK
from .snapshots import Snapshots

LEAST_GRACE_S = 30.0  # longest wait for the end of a step, where steps are short
GRACE_STEPS = 3.0  # and where they are long: so many of the longest recent one
RECENT = 20  # steps


@dataclass
class Stopping:
    """How far a request to stop has come.

    Attributes:
        asked: when it came, on a monotonic clock in seconds; None: it has not.
        moved: when the run last came nearer to its end since.
        positions: the step that each device is in, -1 if it has begun none; None: they have not
            been asked.
        at: the step before which all stop; None: it is not known yet.
        begun_s: how long a step had been under way when it came; that one may be longer than all.
        recent_s: what the last steps took.
    """

    asked: float | None = None
    moved: float = 0.0
    positions: dict[str, int] | None = None
    at: int | None = None
    begun_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def ask(self, now: float) -> None:
        """Take a request; later ones change nothing. Signal handlers may call this."""
        if self.asked is None:
            self.begun_s = now - self.moved if self.recent_s else 0.0
            self.asked = now

    @property
    def is_under_way(self) -> bool:
        """Whether devices were asked for their positions, and do not know yet where to stop."""
        return self.positions is not None and self.at is None

    def begin(self, fresh: Iterable[str]) -> bool:
        """Return, once only, whether devices are to be asked for their positions.

        Args:
            fresh: devices that have certainly begun no step, and will hear of the request first.
        """
        if self.asked is None or self.positions is not None:
            return False
        self.positions = dict.fromkeys(fresh, -1)
        return True

    def hear(self, device: str, step: int) -> None:
        """Hear the step that a device is in; of one that was replaced since, the later counts."""
        if self.positions is not None:
            self.positions[device] = max(step, self.positions.get(device, -1))

    def decide(self, devices: Collection[str], least: int) -> bool:
        """Return, once only, whether it is now known where to stop.

        All can reach that step: a device waits before the next one until it is known.

        Args:
            devices: all; each must have said where it is.
            least: they have a snapshot of this step, or have told the loss of the one before.
        """
        if self.positions is None or self.at is not None or set(devices) - self.positions.keys():
            return False
        self.at = max(least, *(step + 1 for step in self.positions.values()))
        return True

    # ------------------------------------------------------------------ how long it may take

    def step_took(self, step_s: float, now: float) -> None:
        """Hear that a device has ended a step."""
        self.recent_s.append(step_s)
        self.move(now)

    def move(self, now: float) -> None:
        """Hear of something that brings the end nearer: the wait for the next begins now."""
        self.moved = now

    def wait_longer(self, seconds: float, now: float) -> None:
        """Take no account of time in which processes had no processor."""
        if self.asked is not None:
            self.moved = min(now, max(self.asked, self.moved) + seconds)

    def grace_s(self, untimed_s: float, hang_s: float) -> float:
        """Return how long the end of a step may take, which may be longer than those before.

        Args:
            untimed_s: if none has ended yet.
            hang_s: who makes no progress for so long is ended, and replaced.
        """
        if not self.recent_s:
            return max(LEAST_GRACE_S, untimed_s)
        return max(LEAST_GRACE_S, hang_s, GRACE_STEPS * max(self.begun_s, *self.recent_s))

    def is_late(self, now: float, grace_s: float) -> bool:
        """Return whether nothing has come nearer to the end for too long."""
        return self.asked is not None and now - max(self.asked, self.moved) > grace_s


class Stops(Protocol):
    """What can be asked to stop: a supervisor, or the agent of another host."""

    def ask_to_stop(self) -> None:
        """End the run after the step that it is in; signal handlers may call this."""


@contextmanager
def stopped_by_sigterm(supervisor: Stops) -> Iterator[None]:
    """Let SIGTERM, or the end of the terminal, stop the run after its step.

    Only the main thread can take signals; who ignores the terminal's end (nohup) goes on doing so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind in kinds:
        if kind == signal.SIGTERM or before[kind] == signal.SIG_DFL:
            signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            if handler is not None:  # it is Python's to give back
                signal.signal(kind, handler)


class Ending:
    """Bring a run to the step before which it stops.

    Args:
        job: how long that may take.
        crew: the processes.
        stopping: how far the request has come.
        snapshots: it stops at their newest step or later.
        told: and after the last step that the caller knows of.
    """

    def __init__(
        self, job: Job, crew: Crew, stopping: Stopping, snapshots: Snapshots, told: ToldSteps
    ) -> None:
        self.job, self.crew, self.stopping = job, crew, stopping
        self.snapshots, self.told = snapshots, told

    def look(self, now: float) -> None:
        """Ask devices where they are, once.

        Raises:
            FailedError: one does not come to its end.
        """
        fresh = [str(m.device) for m in self.crew.at_work() if m.ready[0] < 0]
        if self.stopping.begin(fresh):
            self.crew.tell("pause")
            self.look_where()
        grace_s = self._grace_s()
        if self.stopping.is_late(now, grace_s):
            left = [m for m in self.crew.at_work() if not m.finished]
            late = min(left, key=lambda m: not m.pulse.computes)
            what = f"the process of device {late.device} is late"
            failure = Failure(late.device, what, str(late.log))
            raise FailedError(
                failure, f"it did not stop within {grace_s:g} s (see --grace)", code="BX6004"
            )

    def _grace_s(self) -> float:
        """Return how long the end of a step, or then of the last commit, may take."""
        if self.job.grace_s is not None:
            return self.job.grace_s
        waits = (m.pulse.waits_for for m in self.crew.at_work())
        writes = any(wait is not None and wait.kind == DISK for wait in waits)
        step_s = self.stopping.grace_s(self.job.start_s, self.job.hang_s)
        return max(step_s, self.job.start_s if writes else 0.0)

    def look_where(self) -> None:
        """Tell all where to stop, as soon as that is known."""
        least = max(self.snapshots.epoch, self.told.newest + 1)
        if self.stopping.decide(self.crew.devices, least):
            self.crew.report("stopping", step=self.stopping.at)
            self.crew.tell("stop_at", step=self.stopping.at)

    def hear_at(self, member: Member, step: int) -> None:
        """Hear the step that a device is in."""
        self.stopping.hear(str(member.device), step)
        self.look_where()
