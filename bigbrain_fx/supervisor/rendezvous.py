"""How all devices meet: they say which messages they wait for, tell addresses, and connect.

A generation that is announced, as a process has ended or connections were lost without that:

    ready ... ready ──▶ go ──▶ put ... put ──▶ formed ... formed: all are at work
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .crew import Crew
from .job import FailedError
from .judging import Failure, Judge
from .processes import Member

LINKS_S = 0.5  # connections that were lost without a death are made anew after this


@dataclass(frozen=True)
class LostLinks:
    """Connections that failed, since when, and what a device reported; None: no device did."""

    since: float
    text: str
    device: str | None = None

    @property
    def what(self) -> str:
        """Say what failed, and where that was noticed."""
        return self.text if self.device is None else f"device {self.device} lost a connection"


class Rendezvous:
    """Lead the processes of a crew through their generations.

    Attributes:
        broken_since: when the first thing broke after which not all are connected again yet.
        lost: the connections that were lost in the newest generation.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.relinks = Judge(crew.job.restarts, crew.job.window_s)
        self.broken_since: float | None = None
        self.lost: LostLinks | None = None

    def break_up(self, now: float) -> None:
        """Note that not all are connected."""
        self.broken_since = self.broken_since or now

    def announce(self) -> None:
        """Let all devices meet in the crew's generation."""
        self.lost = None
        self.break_up(self.crew.clock.now())
        self.crew.tell("generation", **self.generation())

    def generation(self) -> dict[str, Any]:
        """Return a device's orders for the newest generation; old bundles know no lost ones."""
        lost = self.crew.lost
        return {"number": self.crew.generation, **({"lost": lost} if lost else {})}

    def all_formed(self) -> bool:
        """Return whether all devices are connected in the newest generation."""
        return self.crew.all_are(lambda member: member.formed)

    # ------------------------------------------------------------------ what processes say

    def hear_ready(
        self,
        member: Member,
        generation: int,
        expected: dict[str, int],
        layouts: dict[str, Any],
        lacks: int | None = None,
    ) -> None:
        """Receive what a device waits for; tell all of all once the last has said so."""
        member.ready = generation, {"expected": expected, "layouts": layouts}
        member.lacks = lacks
        if not self.crew.all_are(lambda m: m.ready[0]):
            return
        told: dict[str, Any] = {"expected": {}, "layouts": {}}
        for other in self.crew.at_work():
            for kind, found in other.ready[1].items():
                told[kind] |= found
        at_work = self.crew.at_work()
        told |= self.crew.policies.joined("meet", at_work)
        self.crew.tell("go", generation=self.crew.generation, **told)

    def hear_put(self, member: Member, key: str, value: str) -> None:
        """Pass on a value, unless it is of a generation that was given up."""
        if key.startswith(f"{self.crew.generation}/"):
            self.crew.tell("value", key=key, value=value)

    def hear_formed(self, member: Member, generation: int) -> bool:
        """Note that a device is connected; return whether it was the last."""
        member.formed = generation
        self.crew.policies.ask("connected", member, self.crew.clock.now())
        if not self.all_formed() or self.broken_since is None:
            return False
        after_s, self.broken_since = self.crew.clock.now() - self.broken_since, None
        self.crew.report("formed", after_s=after_s)
        return True

    def hear_lost(self, member: Member, generation: int, text: str, alive: bool = False) -> None:
        """Note that a connection was lost: the first sign of a death, unless all are `alive`.

        Bundles that were written before that was said are still run.
        """
        if generation == self.crew.generation and (self.lost is None or alive):
            since = self.crew.clock.now() - (LINKS_S if alive else 0.0)
            self.lost = LostLinks(since, text, member.device)

    # ------------------------------------------------------------------ lost connections

    def lock(self, now: float) -> None:
        """Note that all devices wait for each other: connections have lost a message."""
        self.lost = LostLinks(now - LINKS_S, "all devices wait for each other")

    def must_meet_anew(self, now: float) -> bool:
        """Return whether connections failed though nobody has died.

        Raises:
            FailedError: they did too often.
        """
        lost = self.lost
        if lost is None or now - lost.since < LINKS_S:
            return False
        named = {} if lost.device is None else {"device": lost.device}
        self.crew.report("links_lost", **named, text=lost.text)
        spent = self.relinks.spent(now)
        if spent is not None:
            failure = Failure(lost.device, lost.what, str(self.crew.job.logs), text=lost.text)
            raise FailedError(
                failure, f"connections are lost again and again: {spent}", code="BX6012"
            )
        return True
