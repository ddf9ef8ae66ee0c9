"""A replica that is lost for good: which devices go with it, and what the others then forget.

They begin again the step in which it was lost: nobody has updated in it. This file knows groups of
devices; what one computes in place of another is theirs to know.
"""

from __future__ import annotations

from collections.abc import Collection

from .catch_up import CatchUp
from .crew import Crew
from .judging import Death, Stop
from .peering import Peering
from .processes import Member
from .votes import Votes


class Losing:
    """Leave replicas out of a crew.

    Attributes:
        planned: the devices of each replica, as processes have said it; none, where the run cannot
            go on without one.
        since: the generation of the newest loss; -1: there was none.
    """

    def __init__(self, crew: Crew, votes: Votes, catch_up: CatchUp, peering: Peering) -> None:
        self.crew, self.votes, self.catch_up, self.peering = crew, votes, catch_up, peering
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
        crew, ways = self.crew, self.catch_up.ways
        for member in [m for m in crew.at_work() if m.device in lost]:
            crew.recall_one(member)
        crew.devices = tuple(name for name in crew.devices if name not in lost)
        self.votes.devices -= set(lost)
        self.votes.votes.clear()
        self.catch_up.ways = {name: way for name, way in ways.items() if name not in lost}

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
