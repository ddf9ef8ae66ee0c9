"""Patience with a run that ends on request: as long as a step takes, and then it is given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .crew import Crew
from .job import FailedError
from .judging import Failure
from .processes import Member
from .protocol import DISK
from .stopping import Stopping

if TYPE_CHECKING:
    from .watch import Pulse

LEAST_GRACE_S = 30.0  # longest wait for the end of a step, where steps are short
GRACE_STEPS = 3.0  # and where they are long: so many of the longest recent one
RECENT = 20  # steps


class Grace:
    """How long a request to stop may take; times are of the crew's clock.

    Args:
        crew: the processes, and the job that may say how long.
        stopping: how far the request has come.
        pulse_of: says how far a process is.

    Attributes:
        moved: when the run last came nearer to its end.
        recent_s: what the last steps took.
        begun_s: how long a step had been under way when the request came; that one may be longer
            than all. None: it has not come.
    """

    def __init__(self, crew: Crew, stopping: Stopping, pulse_of: Callable[[Member], Pulse]) -> None:
        self.crew, self.stopping, self.pulse_of = crew, stopping, pulse_of
        self.moved = 0.0
        self.recent_s: deque[float] = deque(maxlen=RECENT)
        self.begun_s: float | None = None

    def move(self, now: float) -> None:
        """Note something that brings the end nearer: the wait for the next begins now."""
        self._note_begun()
        self.moved = now

    def step_took(self, step_s: float, now: float) -> None:
        """Note that a device has ended a step."""
        self.move(now)
        self.recent_s.append(step_s)

    def wait_longer(self, seconds: float, now: float) -> None:
        """Take no account of time in which processes had no processor."""
        asked = self.stopping.asked
        if asked is not None and self.crew.job.grace_s is None:
            self._note_begun()
            self.moved = min(now, max(asked, self.moved) + seconds)

    def look(self, now: float) -> None:
        """Refuse to wait any longer.

        Raises:
            FailedError: a device does not come to its end.
        """
        self._note_begun()
        grace_s = self._seconds()
        if not self.is_late(now, grace_s):
            return
        left = [m for m in self.crew.at_work() if not m.finished]
        late = min(left, key=lambda m: not self.pulse_of(m).computes)
        failure = Failure(
            late.device, f"the process of device {late.device} is late", str(late.log)
        )
        why = f"it did not stop within {grace_s:g} s (see --grace)"
        raise FailedError(failure, why, code="BX6004")

    def is_late(self, now: float, grace_s: float) -> bool:
        """Return whether nothing has come nearer to the end for too long."""
        asked = self.stopping.asked
        return asked is not None and now - max(asked, self.moved) > grace_s

    def of_step(self, untimed_s: float, hang_s: float) -> float:
        """Return how long the end of a step may take, which may be longer than those before.

        Args:
            untimed_s: if none has ended yet.
            hang_s: who makes no progress for so long is ended, and replaced.
        """
        if not self.recent_s:
            return max(LEAST_GRACE_S, untimed_s)
        longest = max(self.begun_s or 0.0, *self.recent_s)
        return max(LEAST_GRACE_S, hang_s, GRACE_STEPS * longest)

    def _seconds(self) -> float:
        """Return how long the end of a step, or then of the last commit, may take."""
        job = self.crew.job
        if job.grace_s is not None:
            return job.grace_s
        waits = (self.pulse_of(m).waits_for for m in self.crew.at_work())
        writes = any(wait is not None and wait.kind == DISK for wait in waits)
        step_s = self.of_step(job.start_s, job.hang_s)
        return max(step_s, job.start_s if writes else 0.0)

    def _note_begun(self) -> None:
        asked = self.stopping.asked
        if asked is not None and self.begun_s is None:
            self.begun_s = max(0.0, asked - self.moved) if self.recent_s else 0.0
