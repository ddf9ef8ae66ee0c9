"""Decisions of devices, stored for processes that start later; notes from device to device.

A note's key may have a number between slashes ("shard/40/d1"): of each kind of such notes, those
with the newest few numbers stay. A run of any length then keeps a board of one size. Notes of
commits count when the steps behind their states are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .crew import Crew
from .policies import END
from .processes import Member

OLDER = re.compile(r"the (batch|copies) of .*step (\d+)")  # so bundles said it until 0.2.0
KEPT = 4  # numbers of a kind; one commit is written at a time, and a replacement asks for two
NUMBERED = re.compile(r"([^/]+)/(\d+)/.+")


@dataclass
class Notes:
    """Notes by key."""

    notes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def post(self, key: str, text: str) -> list[str]:
        """Keep a note, in place of one of the same key; return the keys that were dropped."""
        is_new = key not in self.notes
        self.notes[key] = text
        match = NUMBERED.fullmatch(key)
        if match is None or not is_new:
            return []
        kind = self.numbers.setdefault(match[1], {})
        kind.setdefault(int(match[2]), []).append(key)
        dropped = []
        while len(kind) > KEPT:
            dropped += kind.pop(min(kind))
        for old in dropped:
            del self.notes[old]
        return dropped


@dataclass(frozen=True)
class Decision:
    """Votes of all devices on a step.

    Attributes:
        against: the devices that said no; the step's update is made if there are none.
        is_new: no device knew the decision before.
    """

    against: tuple[str, ...]
    is_new: bool


@dataclass
class Votes:
    """The first statement on each subject, the notes for all, and the votes on each step."""

    devices: frozenset[str]
    firsts: dict[str, str] = field(default_factory=dict)
    board: Notes = field(default_factory=Notes)
    votes: dict[int, dict[str, bool]] = field(default_factory=dict)

    def first(self, what: str, text: str) -> str:
        """Return what was said of something first; `text`, if nothing was."""
        return self.firsts.setdefault(what, text)

    def vote(self, device: str, step: int, yes: bool) -> Decision | None:
        """Count a vote; None while others are missing.

        A device that does a step again votes again, and receives the decision again.
        """
        votes = self.votes.setdefault(step, {})
        is_new = device not in votes
        votes[device] = yes
        if set(votes) != self.devices:
            return None
        return Decision(tuple(sorted(name for name, says in votes.items() if not says)), is_new)

    def forget_steps(self, before: int) -> None:
        """Forget the votes on steps that nobody does again, and what their batches were."""
        self.votes = {step: votes for step, votes in self.votes.items() if step >= before}
        self.forget_subjects(lambda _, of: of < before)

    def forget_subjects(self, is_old: Callable[[str, int], bool]) -> None:
        """Forget what was said first of some things, by kind and step: "batch/7" names one."""
        for what in list(self.firsts):
            kind, _, rest = OLDER.sub(r"\1/\2", what).partition("/")
            step = rest.partition("/")[0]
            if step.isdigit() and is_old(kind, int(step)):
                del self.firsts[what]


class Posting:
    """Pass notes on.

    Args:
        crew: the processes.
        votes: keeps the board, for those that start later.
    """

    def __init__(self, crew: Crew, votes: Votes) -> None:
        self.crew, self.votes = crew, votes

    def hear_first(self, member: Member, what: str, text: str) -> None:
        """Answer with what the first process said of something."""
        self.crew.order(member, "first", what=what, text=self.votes.first(what, text))

    def hear_post(self, member: Member, key: str, text: str) -> None:
        """Put a note on the board of all, as soon as it counts."""
        self.crew.policies.ask("move", self.crew.clock.now())
        if member.recalled and self.crew.policies.any(
            "starts_over"
        ):  # of commits that are no more under way
            return
        kind, _, rest = key.partition("/")
        if kind in ("shard", "aside"):  # these count when all devices have said theirs
            step = int(rest.partition("/")[0]) if kind == "shard" else END
            self.crew.policies.when_clean(step, lambda: self._post(member, key, text))
        else:
            self._post(member, key, text)

    def _post(self, member: Member, key: str, text: str) -> None:
        dropped = self.votes.board.post(key, text)
        if key.startswith("event/"):
            self.crew.report(key.rpartition("-")[2], device=member.device, **json.loads(text))
            return
        self.crew.tell("post", key=key, text=text)
        for other in self.crew.at_work() if dropped else ():
            if "forget" in other.knows:
                self.crew.order(other, "forget", keys=dropped)
