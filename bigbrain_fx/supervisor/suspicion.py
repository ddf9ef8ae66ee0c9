"""Steps that spares compute again: devices that tape, spares that check, events that wait.

    a device   "tape" ──▶ has memory for it ──▶ "taped" ──▶ a spare checks ──▶ "checked"

A state after a step (a snapshot of all devices, a commit, the end) counts once all tapes of steps
before it are checked. A state older than a difference is therefore always there to go back to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .crew import Crew, Spares
from .job import FailedError
from .judging import Death
from .policies import Act, Acts
from .processes import Member
from .snapshots import nameless
from .votes import Votes

if TYPE_CHECKING:
    from .host import Supervisor

TRIES = 2  # processes that may end over one tape

Differ = Callable[["Taped", str], None]


@dataclass
class Taped:
    """A tape that is whole: of which step, and where its second part starts.

    Attributes:
        number: no other tape of the run has it.
        checker: who computes it again now.
        since: when that began; of the crew's clock.
        tries: how many have ended over it.
    """

    device: str
    step: int
    start: int
    number: int
    checker: Member | None = None
    since: float = 0.0
    tries: int = 0


class Suspicion:
    """The tapes of all devices, one of each at a time.

    Args:
        crew: whose spares check.
        spares: to be started where there are none.
        differ: receives a tape with another result, and that result.

    Attributes:
        checked: how many tapes came out the same.
    """

    def __init__(self, crew: Crew, spares: Spares, differ: Differ) -> None:
        self.crew, self.spares, self.differ = crew, spares, differ
        self.files: dict[str, int] = {}
        self.granted: dict[str, Member] = {}  # devices that tape
        self.wanted: dict[str, tuple[Member, int]] = {}  # that wait until they may
        self.tapes: dict[str, Taped] = {}
        self.held: list[tuple[int, Act]] = []
        self.checked = self.number = 0

    def acts(self) -> Acts:
        """Return the methods that follow from messages of processes, by message."""
        return {
            "tape": self.hear_tape,
            "taped": self.hear_taped,
            "checked": self.hear_checked,
        }

    def orders(self) -> dict[str, float]:
        """Return what a process receives besides: the share of steps to tape."""
        return {"suspect": self.crew.job.suspect}

    # ------------------------------------------------------------------ what processes say

    def greet(self, member: Member) -> None:
        """Refuse a process that can check nothing."""
        if "check" not in member.knows:
            self.crew.refuse(member, "its bundle is older than --suspect: split again")

    def ignores(self, member: Member) -> bool:
        """Whether what a process says does not count: what it computed may be wrong."""
        return member.recalled

    def hear_tape(self, member: Member, step: int) -> None:
        """Note that a device wants to tape its step."""
        device = str(member.device)
        self.wanted[device] = member, step
        if device not in self.tapes:
            self._grant(device)

    def _grant(self, device: str) -> None:
        if device not in self.wanted:
            return
        member, step = self.wanted.pop(device)
        if device not in self.files:
            self.files[device] = nameless()
        self.granted[device] = member
        self.crew.order(member, "tape", files=[self.files[device]], step=step)

    def hear_taped(self, member: Member, step: int, start: int) -> None:
        """Note that a tape is whole."""
        device = str(member.device)
        if self.granted.pop(device, None) is not member:
            raise ValueError(f"{device} has taped step {step}, and nobody asked for it")
        self.number += 1
        self.tapes[device] = Taped(device, step, start, self.number)
        self.look()

    def hear_checked(self, member: Member, number: int, text: str) -> None:
        """Receive what came out otherwise; of a tape that was given up, nothing follows."""
        found = next((t for t in self.tapes.values() if t.number == number), None)
        if found is None:
            return
        if text:
            self.differ(found, text)
            return
        self.checked += 1
        self._forget_tape(found)

    def hear_end(self, gone: Member) -> None:
        """Note that a process has ended: as a device, or over a tape."""
        device = str(gone.device)
        if self.granted.get(device) is gone:
            del self.granted[device]
        if device in self.wanted and self.wanted[device][0] is gone:
            del self.wanted[device]
        for tape in [t for t in self.tapes.values() if t.checker is gone]:
            tape.checker, tape.tries = None, tape.tries + 1
            if tape.tries >= TRIES:
                self._give_up(tape, f"{tape.tries} processes ended over it")

    # ------------------------------------------------------------------ who checks

    def look(self, now: float | None = None) -> None:
        """Give tapes to spares that are free, and end those that have one for too long."""
        if self.crew.ending:
            return
        now = self.crew.clock.now() if now is None else now
        for tape in [t for t in self.tapes.values() if t.checker is None]:
            if tape.checker is None and self.tapes.get(tape.device) is tape:
                self._give(tape, now)
        for tape in self.tapes.values():
            if tape.checker is not None and now - tape.since > self.crew.job.start_s:
                tape.checker.kill()

    def _give(self, tape: Taped, now: float) -> None:
        busy = [t.checker for t in self.tapes.values()]
        spares = [m for m in self.crew.spares("") if m not in busy]
        if not spares and not self.crew.spares(""):
            self.spares.fill()
            if not self.crew.spares(""):
                self._give_up(tape, "there is no spare")
            return
        free = next((m for m in spares if m.is_warm), None)
        if free is None:
            return
        tape.checker, tape.since = free, now
        rank = self.crew.job.devices.index(tape.device)
        files = [self.files[tape.device]]
        where = {"rank": rank, "start": tape.start, "number": tape.number}
        self.crew.order(free, "check", files=files, **where)

    def _give_up(self, tape: Taped, why: str) -> None:
        self.crew.report("unchecked", device=tape.device, step=tape.step, text=why)
        self._forget_tape(tape)

    def _forget_tape(self, tape: Taped) -> None:
        del self.tapes[tape.device]
        self._grant(tape.device)
        self.look()
        self._release()

    # ------------------------------------------------------------------ what waits

    def when_clean(self, step: int, act: Act) -> None:
        """Do something that keeps what came of the steps before `step`, once they are checked."""
        if self._is_clean(step):
            act()
        else:
            self.held.append((step, act))

    def _is_clean(self, step: int) -> bool:
        return all(tape.step >= step for tape in self.tapes.values())

    def _release(self) -> None:
        due = [(step, act) for step, act in self.held if self._is_clean(step)]
        self.held = [one for one in self.held if one not in due]
        for _, act in due:
            act()

    # ------------------------------------------------------------------ the end

    def forget_tapes(self) -> None:
        """Forget all tapes, and what waits for them: all devices start again."""
        self.tapes, self.granted, self.wanted, self.held = {}, {}, {}, []

    def close(self) -> None:
        """Give the memory back."""
        for file in self.files.values():
            os.close(file)
        self.files.clear()


def go_back(of: Supervisor, tape: Taped, text: str) -> None:
    """Let all devices go back where a spare has computed a step otherwise.

    One of the two is wrong: both end. All others have computed with what the device sent.

    Raises:
        FailedError: it is not worth a restart.
    """
    crew = of.crew
    found = next(m for m in crew.at_work() if m.device == tape.device)
    crew.report("suspect", device=tape.device, step=tape.step, text=text)
    death = Death(tape.device, tape.step, 1, text, str(found.log), True, was_suspect=True)
    stop = of.judge.stop_for(death, crew.clock.now())
    if stop is not None:
        raise FailedError(death, stop.reason, code="BX6006", moves=True)
    if tape.checker is not None:
        crew.recall_one(tape.checker)
    of.policies.ask("forget_tapes")
    for slots in of.snapshots.slots.values():
        slots.steps = [step if step <= of.snapshots.epoch else -1 for step in slots.steps]
    start = of.snapshots.start
    take_back(of.votes, start)
    of.told.newest = min(of.told.newest, start - 1)  # losses since then were wrong
    of.take_all_back()


def take_back(votes: Votes, step: int) -> None:
    """Forget what was said of steps from `step` on, and commits of them that are not whole."""
    votes.votes = {number: said for number, said in votes.votes.items() if number < step}
    # with others to add gradients copies of weights may be others
    votes.forget_subjects(lambda kind, of: kind == "copies" and of >= step)
    notes, board = votes.board.notes, votes.board.numbers
    for numbers in board.values():
        partly = [n for n, keys in numbers.items() if n > step and len(keys) < len(votes.devices)]
        for key in [key for number in partly for key in numbers.pop(number)]:
            del notes[key]
    for key in [key for key in notes if key.startswith(("contents/", "aside/"))]:
        del notes[key]
