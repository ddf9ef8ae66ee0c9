"""Parts of a supervisor that only some runs have, as they are in a run that has them not.

    SpareChecks   `--suspect`: `suspicion.Suspicion`
    PeerStates    replicas: `peering.Peering`
    LostReplicas  replicas: `losing.Losing`

A supervisor speaks to these; a bundle has the files of those that its plan or its flags need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .catch_up import CatchUp
from .judging import Death, Stop
from .processes import Member
from .snapshots import Snapshots

END = 1 << 62  # a step after all others

Act = Callable[[], None]
Acts = dict[str, Callable[..., object]]


class SpareChecks:
    """No step is computed again: whatever comes of one counts at once."""

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {}

    def look(self) -> None:
        """Act on tapes that wait."""

    def hear_end(self, gone: Member) -> None:
        """Hear that a process has ended."""

    def when_clean(self, step: int, act: Act) -> None:
        """Do something that keeps what came of the steps before `step`, once they are checked."""
        act()

    def forget(self) -> None:
        """Forget all tapes."""

    def close(self) -> None:
        """Give the memory back."""


class PeerStates:
    """Snapshots alone: no device has what another has.

    Attributes:
        is_elastic: only where the run can go on without a replica.
        is_on: states come from peers; known when all devices have first met.
        begins_again: no step has ended since nobody had the state of a device any more.
    """

    def __init__(self, snapshots: Snapshots, catch_up: CatchUp) -> None:
        self.snapshots, self.catch_up = snapshots, catch_up
        self.is_elastic = self.is_on = self.begins_again = False

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {"begins": self.hear_begins}

    def orders(self) -> dict[str, bool]:
        """Return what a process is told besides that it is to be a device."""
        return {}

    def meet(self, members: list[Member]) -> dict[str, Any]:
        """Return what all devices are told besides, when they first meet."""
        return {}

    def hear_begins(self, member: Member, step: int) -> None:
        """Hear from which step a device goes on after a commit that the run resumes."""
        self.snapshots.first = step
        self.catch_up.begin(str(member.device), step)

    def hear_loss(self, step: int, loss: float | None, step_s: float) -> None:
        """Hear of a loss, with a vote."""

    def end_step(self, step: int) -> None:
        """Hear that all devices have voted on a step."""

    def take_over(self, device: str) -> None:
        """Hear that a process has died."""

    def lacks_snapshot(self) -> bool:
        """Whether nobody has a dead device's state, though others have gone on from it."""
        return False

    def begin_again(self, why: str) -> None:
        """End all processes, whose states nobody has."""
        raise NotImplementedError


class LostReplicas:
    """One replica: the run ends with it."""

    def can_leave_out(self, device: str) -> bool:
        """Whether others have all that a device's replica has."""
        return False

    def leave_out(self, death: Death, reason: str) -> None:
        """End what is left of a replica."""
        raise NotImplementedError

    def why_not(self, stop: Stop) -> str:
        """Say why a run ends."""
        return stop.reason + stop.more

    def report_end(self) -> None:
        """Say who is left."""

    def is_of_before(self, member: Member) -> bool:
        """Whether what a device says may be of a step that is begun again."""
        return False
