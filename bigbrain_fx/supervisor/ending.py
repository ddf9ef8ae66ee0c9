"""A request to stop, carried through: where all stop is agreed on, and whoever is late is found."""

from __future__ import annotations

from .catch_up import ToldSteps
from .crew import Crew
from .job import FailedError, Job
from .judging import Failure
from .processes import Member
from .protocol import DISK
from .snapshots import Snapshots
from .stopping import Stopping


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
