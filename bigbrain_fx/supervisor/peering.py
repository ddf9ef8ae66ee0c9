"""A run without snapshots: the state of a dead device comes from its peers in other replicas.

All devices vote on every step, when they have all of its messages, and update when all have voted:
until then every device has the beginning of the step, and from then on that of the next. What a
device alone would have told after its update, the step's loss, it tells with its vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .crew import Crew
from .policies import Acts
from .processes import Member
from .snapshots import Snapshots
from .votes import Notes, Votes

TellStep = Callable[[int, float, float], None]  # step, loss, seconds


class Peering:
    """What follows for the parts of a supervisor; nothing, where a run keeps snapshots.

    Attributes:
        is_elastic: only where the run can go on without a replica.
        is_wanted: off, where snapshots are asked for.
        is_on: states come from peers; known when all devices have first met.
        begins_again: no step has ended since nobody had the state of a device any more.
        is_over: one replica is left: from its next meeting on, its devices take snapshots.
        told: of the newest step of which the loss was told: step, loss, seconds until the vote.
    """

    def __init__(
        self,
        crew: Crew,
        snapshots: Snapshots,
        votes: Votes,
        tell_step: TellStep,
        *,
        is_elastic: bool = False,
        is_wanted: bool = True,
    ) -> None:
        self.crew, self.snapshots, self.votes, self.tell_step = crew, snapshots, votes, tell_step
        self.is_elastic, self.is_wanted, self.is_over = is_elastic, is_wanted, False
        self.is_on = self.begins_again = False
        self.told: tuple[int, float, float] | None = None

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {"took": self.hear_took, "orphaned": self.hear_orphaned}

    def meet(self, members: list[Member]) -> dict[str, Any]:
        """Be on, where the program of all processes can; return what they are told then."""
        if not (self.is_wanted and self._can_be_on(members)):
            return {}
        self.is_on = True
        return {
            "peers": True,
            "lacking": {m.device: m.lacks for m in members if m.lacks is not None},
        }

    def _can_be_on(self, members: list[Member]) -> bool:
        """Whether the program of all processes can give states, and what else is wanted."""
        if self.is_over:
            return False
        return all("peers" in m.knows and (m.replicas or not self.is_elastic) for m in members)

    def has_states(self) -> bool:
        """Whether the state of a dead device comes from its peers."""
        return self.is_on

    def starts_over(self) -> bool:
        """Whether no step has ended since nobody had the state of a device any more."""
        return self.begins_again

    def orders(self) -> dict[str, bool]:
        """Return what a process is told besides that it is to be a device."""
        found = {"peers": self.is_on, "again": self.begins_again}
        return {name: True for name, is_so in found.items() if is_so}  # old bundles know neither

    # ------------------------------------------------------------------ steps, and deaths in them

    def hear_loss(self, step: int, loss: float | None, step_s: float) -> None:
        """Hear of a loss, with a vote."""
        if loss is not None:
            self.told = step, loss, step_s

    def end_step(self, step: int) -> None:
        """Hear that all devices have voted on a step: nobody wants anything of it again."""
        if self.is_on:
            self.begins_again = False
            self.snapshots.epoch = step + 1  # until all have all of it they have its beginning
            self.votes.forget_steps(before=step + 1)
            self.crew.policies.ask("forget_log")

    def end(self) -> None:
        """Hear that nobody has a peer any more."""
        self.is_on, self.is_over = False, True
        self.snapshots.epoch = -1

    def lacks_snapshot(self) -> bool:
        """Whether nobody has a dead device's state, though others have gone on from it."""
        return self.is_over and self.snapshots.epoch < 0

    def take_over(self, device: str) -> None:
        """Hear that a process has died: no other may update before its replacement votes."""
        if self.is_on:
            for votes in self.votes.votes.values():
                votes.pop(device, None)
            if self.told is not None and self.snapshots.epoch > self.told[0]:
                self.tell_step(*self.told)  # it may have died before it told; again means nothing

    def hear_took(self, member: Member, step: int, peers: Sequence[str], bytes: int) -> None:
        """Hear that a device has its state again."""
        about = {"step": step, "peers": ", ".join(peers), "bytes": bytes}
        self.crew.report("took_state", device=member.device, **about)

    # ------------------------------------------------------------------ a state that nobody has

    def hear_orphaned(self, member: Member, text: str) -> None:
        """Hear that nobody has something of a device's state."""
        if not member.recalled:
            self.begin_again(f"nobody has {text} of {member.device}: its peers have died, too")

    def begin_anew(self, why: str) -> bool:
        """Begin again, where states come from peers; return whether that is so."""
        if self.is_on:
            self.begin_again(why)
        return self.is_on

    def begin_again(self, why: str) -> None:
        """End all processes; the next ones begin as those of a run that is resumed."""
        self.crew.report("state_lost", text=why)
        self.begins_again, self.told = True, None
        self.snapshots.epoch = -1
        self.votes.firsts, self.votes.board, self.votes.votes = {}, Notes(), {}
        self.crew.recall()

    def begins(self, member: Member, step: int) -> None:
        """Hear from which step a device goes on then, or after a commit that the run resumes."""
        if self.begins_again and member.device == self.crew.devices[0]:
            self.crew.report("rolled_back", step=step)
