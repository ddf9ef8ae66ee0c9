"""Parts of a supervisor that only some runs have, as they are in a run that has them not.

    Health        `split --with watch`: `watch.Watch`
    KeptMessages  the same: `log_loss.LogLoss`
    SpareChecks   `--suspect`: `suspicion.Suspicion`
    PeerStates    replicas: `peering.Peering`
    LostReplicas  replicas: `losing.Losing`

A supervisor speaks to these; a bundle has the files of those that its plan or its flags need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catch_up import CatchUp
    from .judging import Death, Stop
    from .processes import Member
    from .snapshots import Snapshots

IS_WATCHED = Path(__file__).with_name("watch.py").is_file()  # the bundle has it
END = 1 << 62  # a step after all others

Act = Callable[[], None]
Acts = dict[str, Callable[..., object]]


class KeptMessages:
    """Sent messages are kept for as long as a replacement may want them."""

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {}

    def end_step(self) -> None:
        """Hear that nobody wants a message of the step that ends, nor of those before it."""

    def snapshot(self, step: int) -> bool:
        """Hear of a snapshot of all devices; return whether it makes up for what was missing."""
        return False

    def take_back(self, step: int) -> bool:
        """Return whether all must start again with one that starts at `step`."""
        return False


class Health:
    """Nothing is watched: a process that hangs stays, and none is told how much memory is left."""

    def __init__(self) -> None:
        self.log_loss = KeptMessages()

    def look(self, now: float) -> None:
        """Look after all processes, from time to time."""

    def is_locked(self, now: float) -> bool:
        """Return whether all devices wait for each other."""
        return False

    def meant(self, code: int, now: float) -> bool:
        """Whether a process that ended with this code was ended for want of memory."""
        return False

    def limits(self, host: str) -> dict[str, str]:
        """Return what a process is told of memory, in its environment."""
        return {}

    def left_bytes(self) -> int:
        """Return the memory that can still be taken: here, what this whole host has free."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def mind(self, snapshots: Snapshots, left: int) -> None:
        """Hear what snapshots take, where so many bytes of memory are left."""

    def move(self, now: float) -> None:
        """Hear of something that brings the end of a run nearer."""

    def step_took(self, step_s: float, now: float) -> None:
        """Hear that a device has ended a step."""

    def require_end(self, now: float) -> None:
        """Refuse to wait any longer for the end of a run that is to stop."""


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
