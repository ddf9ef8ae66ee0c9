"""What processes say of their snapshots and of the messages that they keep for a replacement.

Where messages were dropped, for lack of memory, a replacement cannot compute alone: all devices
start again with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .crew import Crew
from .policies import SpareChecks
from .processes import Member
from .snapshots import SnapshotCost, Snapshots
from .votes import Votes


class Snapshotting:
    """Tell all which snapshot counts, and how often one is made.

    Args:
        crew: the processes.
        snapshots: of all devices.
        votes: of steps that nobody runs again.
        log_loss: messages that were dropped, which a snapshot makes up for.
        suspicion: knows which steps are clean.
    """

    def __init__(
        self,
        crew: Crew,
        snapshots: Snapshots,
        votes: Votes,
        log_loss: LogLoss,
        suspicion: SpareChecks,
    ) -> None:
        self.crew, self.snapshots, self.votes = crew, snapshots, votes
        self.log_loss, self.suspicion = log_loss, suspicion

    def hear_cost(self, member: Member, state: int, log: int, copy_s: float, step_s: float) -> None:
        """Hear what a snapshot costs a device."""
        assert member.device is not None
        if self.snapshots.measure(member.device, SnapshotCost(state, log, copy_s, step_s)):
            self.crew.tell("every", steps=self.snapshots.every)
            self._warn()

    def _warn(self) -> None:
        """Say where snapshots take so much of this host's memory that it may run out."""
        job = self.crew.job
        found = self.snapshots.too_large([n for n in self.snapshots.slots if not job.host_of(n)])
        if found is not None:
            wanted, left = found
            self.crew.report("snapshots_large", bytes=2 * wanted, left=left)

    def hear_snapshot(self, member: Member, step: int, slot: int, bytes: int) -> None:
        """Hear of a device's whole snapshot; it counts when its step is clean."""
        self.suspicion.when_clean(step, lambda: self._take(member, step, slot))

    def _take(self, member: Member, step: int, slot: int) -> None:
        if member not in self.crew.at_work():  # it has died since, and another begins before it
            return
        assert member.device is not None
        if not self.snapshots.take(member.device, step, slot):
            return
        newest = self.snapshots.epoch
        self.crew.tell("epoch", step=newest)
        self.votes.forget_steps(before=newest)
        if self.log_loss.snapshot(newest):
            self.crew.report("log_whole", step=newest)
        self.crew.report("snapshot", step=newest, every=self.snapshots.every)

    def hear_log_dropped(self, member: Member, step: int, bytes: int) -> None:
        """Hear that a device has dropped messages up to a step."""
        if member.recalled:  # an old word of one that starts again anyway
            return
        if self.log_loss.drop(step):
            self.crew.report("log_dropped", device=member.device, step=step, bytes=bytes)


@dataclass
class LogLoss:
    """The messages that some device has dropped: those up to `step`; -1: none is missing."""

    step: int = -1
    is_told: bool = False  # once is enough, where every step may drop some

    def drop(self, step: int) -> bool:
        """Hear that those up to a step are gone; return whether none was missing before."""
        is_first = self.step < 0 and not self.is_told
        self.step = max(self.step, step)
        return is_first

    def end_step(self) -> None:
        """Hear that nobody wants a message of the step that ends, nor of those before it."""
        self.is_told = self.is_told or self.step >= 0
        self.step = -1

    def snapshot(self, step: int) -> bool:
        """Hear of a snapshot of all devices; return whether it makes up for what was missing."""
        if not 0 <= self.step < step:
            return False
        self.step = -1
        return True

    def take_back(self, step: int) -> bool:
        """Return whether all must start again with one that starts at `step`.

        They then send all that was missing again.
        """
        if self.step < step:
            return False
        self.step = -1
        return True
