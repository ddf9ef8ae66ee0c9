"""A run without snapshots: the state of a dead device comes from its peers in other replicas.

All devices vote on every step, when they have all of its messages, and update when all have voted.
Until then every device has the beginning of the step, and from then on that of the next. With its
vote a device sends the loss of the step, which it would else report after its update.

`Losing` handles a replica that is lost for good. The other replicas begin again the step in which
it was lost, for no device has updated in that step. The program knows which replica computes in
place of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .crew import Crew
from .judging import Death, Stop
from .policies import Acts
from .processes import Member
from .snapshots import Snapshots
from .votes import Notes, Votes

TellStep = Callable[[int, float, float], None]  # step, loss, seconds


class Peering:
    """Peer recovery for the parts of a supervisor; inactive, where a run keeps snapshots.

    Attributes:
        is_elastic: only where the run can go on without a replica.
        is_wanted: off, where snapshots are asked for.
        is_on: states come from peers; known when all devices have first met.
        begins_again: no step has ended since nobody had the state of a device any more.
        is_over: one replica is left: from its next meeting on, its devices take snapshots.
        told: step, loss and seconds until the vote, of the newest reported step.
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
        """Be on, where the program of all processes can; return what they receive then."""
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
        """Return what a process receives besides that it is to be a device."""
        found = {"peers": self.is_on, "again": self.begins_again}
        return {name: True for name, is_so in found.items() if is_so}  # old bundles know neither

    # ------------------------------------------------------------------ steps, and deaths in them

    def hear_loss(self, step: int, loss: float | None, step_s: float) -> None:
        """Note a loss, with a vote."""
        if loss is not None:
            self.told = step, loss, step_s

    def end_step(self, step: int) -> None:
        """Note that all devices have voted on a step: nobody wants anything of it again."""
        if self.is_on:
            self.begins_again = False
            self.snapshots.epoch = step + 1  # until all have all of it they have its beginning
            self.votes.forget_steps(before=step + 1)
            self.crew.policies.ask("forget_log")

    def end(self) -> None:
        """Note that nobody has a peer any more."""
        self.is_on, self.is_over = False, True
        self.snapshots.epoch = -1

    def lacks_snapshot(self) -> bool:
        """Whether nobody has a dead device's state, though others have gone on from it."""
        return self.is_over and self.snapshots.epoch < 0

    def take_over(self, device: str) -> None:
        """Note that a process has died: no other may update before its replacement votes."""
        if self.is_on:
            for votes in self.votes.votes.values():
                votes.pop(device, None)
            if self.told is not None and self.snapshots.epoch > self.told[0]:
                self.tell_step(*self.told)  # it may have died before it told; again means nothing

    def hear_took(self, member: Member, step: int, peers: Sequence[str], bytes: int) -> None:
        """Note that a device has its state again."""
        about = {"step": step, "peers": ", ".join(peers), "bytes": bytes}
        self.crew.report("took_state", device=member.device, **about)

    # ------------------------------------------------------------------ a state that nobody has

    def hear_orphaned(self, member: Member, text: str) -> None:
        """Note that nobody has something of a device's state."""
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
        """Note from which step a device goes on then, or after a commit that the run resumes."""
        if self.begins_again and member.device == self.crew.devices[0]:
            self.crew.report("rolled_back", step=step)


class Losing:
    """Leave replicas out of a crew.

    Attributes:
        planned: the devices of each replica, as processes have said it; none, where the run cannot
            go on without one.
        since: the generation of the newest loss; -1: there was none.
    """

    def __init__(self, crew: Crew, votes: Votes, peering: Peering) -> None:
        self.crew, self.votes, self.peering = crew, votes, peering
        self.planned: list[list[str]] = []
        self.since = -1

    @property
    def standing(self) -> list[list[str]]:
        """The replicas that are left."""
        return [group for group in self.planned if set(group) <= set(self.crew.devices)]

    def can_leave_out(self, device: str) -> bool:
        """Whether others have all that a device's replica has.

        A process that has taken over a device has its state once it was connected.
        """
        if not (self.peering.is_on and self.peering.is_elastic):
            return False
        self.planned = self.planned or next((m.replicas for m in self.crew.at_work()), [])
        others = [group for group in self.standing if device not in group]
        if not others or len(others) == len(self.standing):
            return False
        last = others[0] if len(others) == 1 else []
        return all(member.formed >= 0 for member in self.crew.at_work() if member.device in last)

    def leave_out(self, death: Death, reason: str) -> None:
        """End what is left of a replica; all others are to meet without it."""
        lost = next(group for group in self.standing if death.device in group)
        self._forget(lost)
        self.peering.take_over(death.device)
        for name in lost:
            self.peering.snapshots.slots.pop(name).close()
            self.peering.snapshots.costs.pop(name, None)
        self.since = self.crew.generation + 1
        self.crew.report(
            "replica_lost",
            replica=self.planned.index(lost),
            devices=", ".join(lost),
            left=self.said(),
            step=self.peering.snapshots.start,
            text=f"{death.device} {death.how}: {reason}",
        )
        if len(self.standing) == 1:
            self.peering.end()

    def _forget(self, lost: Collection[str]) -> None:
        """End the processes of lost devices; all others vote again, and nobody waits for these."""
        crew = self.crew
        for member in [m for m in crew.at_work() if m.device in lost]:
            crew.recall_one(member)
        crew.devices = tuple(name for name in crew.devices if name not in lost)
        self.votes.devices -= set(lost)
        self.votes.votes.clear()
        crew.policies.ask("forget_devices", lost)

    def why_not(self, stop: Stop) -> str:
        """Say, where a run was to go on without replicas, why none can be left out."""
        if not (self.peering.is_elastic and stop.moves):
            return ""
        return "; no other replica that could go on has all that it has"

    def said(self) -> str:
        """Say how many replicas stand."""
        return f"{len(self.standing)} of {len(self.planned)}"

    def report_end(self) -> None:
        """Say, where a run has gone on without replicas, who is left."""
        devices, lost = ", ".join(self.crew.devices), ", ".join(self.crew.lost)
        if lost:
            self.crew.report("standing", replicas=self.said(), devices=devices, lost=lost)

    def is_of_before(self, member: Member) -> bool:
        """Whether what a device says may be of a step that is begun again."""
        return member.ready[0] < self.since
