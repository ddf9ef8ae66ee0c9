"""Commits to the disk while a supervisor replaces processes: no device waits for a dead one.

What devices tell each other about commits is kept by the supervisor, so a replacement knows what
the process before it has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .commit_start import CommitOptions, make_folder, no_event
from .commits import CommitError, graph_in, record_of
from .committing import SHARD, Committer
from .control import Control
from .peers import HeadLostError
from .records import read_records
from .replay import ReplayTransport
from .state import State

if TYPE_CHECKING:
    from .bundle import Bundle
    from .device import Device


class Board:
    """A ledger that the supervisor keeps; a new process has all of it from the start."""

    def __init__(self, control: Control, deadline_s: float) -> None:
        self.control = control
        self.deadline_s = deadline_s

    def post(self, key: str, text: str) -> None:
        """Say something; what was said under the key before is replaced."""
        self.control.post(key, text)

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.control.board.get(key)

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""
        with self.control.changed:
            self.control.changed.wait_for(
                lambda: key in self.control.board or self.control.last is not None, self.deadline_s
            )
            if key in self.control.board:
                return self.control.board[key]
        if self.control.last is not None:
            raise HeadLostError("the supervisor that decides is lost", code="BX5168")
        raise TimeoutError(f"waited {self.deadline_s:g} s for {key}")

    def claim(self, key: str) -> bool:
        """Return whether this process is the first to ask."""
        return self.control.first(f"claim/{key}", str(id(self))) == str(id(self))


class MeetingBoard(Board):
    """A board for the thread that trains: it meets the others anew while it waits."""

    def __init__(self, transport: ReplayTransport) -> None:
        super().__init__(transport.control, 0.0)
        self.transport = transport

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is, whoever dies meanwhile."""
        board = self.control.board
        while key not in board:
            if self.control.wait_for_disk(lambda: key in board, self.transport.generation):
                self.transport.form()
        return board[key]


class SupervisedCommitter(Committer):
    """A device's part in commits; see `Committer`.

    Args:
        transport: of the device: it meets the others anew while this waits for the disk.
        deadline_s: longest wait for what another device says.
    """

    def __init__(
        self,
        transport: ReplayTransport,
        bundle: Bundle,
        device: Device,
        options: CommitOptions,
        deadline_s: float,
    ) -> None:
        about: Mapping[str, Any] = {"plan": bundle.plan, "graph": graph_in(bundle.folder)}
        self.board = board = Board(transport.control, deadline_s)
        own = options.folder, options.every, device.name, device.names, board, about
        super().__init__(*own, keep=options.keep)
        self.misses.tell = self._tell_event if self.leads else no_event
        self.control = transport.control
        self.transport = transport
        self.is_written = True
        self.warned = 0  # times
        self.also: dict[str, frozenset[str]] = {}  # lost devices -> what this has of their states
        self.images: dict[str, bytearray] = {}  # of them

    def join(self, device: Device, *, resume: bool, epoch: int) -> int:
        """Begin as all devices do, or take over from a process that has begun; return the step.

        Args:
            device: as it was loaded, or at its snapshot of step `epoch` if that is not -1.
            resume: the user asks to go on from the last commit.
            epoch: where the device is.
        """
        begun = self.ledger.look("begin")
        if begun is None:
            return self.begin(device, resume=resume)
        decided = json.loads(begun)
        if "error" in decided:
            return self.begin(device, resume=resume)  # which raises it
        self._take_over(decided)
        with suppress(CommitError):  # a commit that is missed says why
            make_folder(self.folder)  # of this host, where nobody may have begun yet
        if self.leads:
            self.misses.newest = self._newest()
        if epoch >= 0:
            self._make_up_for(device, epoch)
            return epoch
        if decided["records"]:
            return self._resume(device, [record_of(t.encode(), "") for t in decided["records"]])
        self._commit(device)
        return 0

    def go_on_with(
        self, names: Sequence[str], also: Mapping[str, frozenset[str]], finished: int
    ) -> None:
        """Be one of fewer devices, and write parts of lost ones: a commit is read by all.

        Args:
            names: of the devices.
            also: lost ones whose parts this writes -> what their states have.
            finished: steps.
        """
        led, self.names = self.leads, tuple(names)
        if self.leads and not led:
            self._lead()
        for name in also.keys() - self.also.keys():
            self._give_up(name, finished)
        self.also = dict(also)

    def _lead(self) -> None:
        """Write the records from now on; the one that is under way is nobody's."""
        self.misses.tell, self.misses.newest = self._tell_event, self._newest()
        if self.misses.newest < self.begun:
            self.misses.miss(self.begun, "the device that writes the record was lost")

    def _give_up(self, lost: str, finished: int) -> None:
        """Miss commits under way for a device that writes its part no more."""
        every = self.every or finished + 1
        last = finished // every * every
        for step in (last, last - every):
            is_begun = 0 <= step <= max(self.begun, finished - 1)
            if is_begun and self.ledger.look(f"{SHARD}/{step}/{lost}") is None:
                self._miss(step, lost, f"{lost} was lost")

    def _miss(self, step: int, name: str, why: str) -> None:
        """Say that a device's part of a commit will not be written."""
        text = json.dumps({"missed": f"{why} before its part was written"})
        self.ledger.post(f"{SHARD}/{step}/{name}", text)

    def has_commits(self) -> bool:
        """Whether there is a commit to go on from."""
        return self._newest() >= 0

    def _newest(self) -> int:
        """Return the step of the newest commit, -1 if there is none, or none can be seen now."""
        with suppress(OSError, CommitError):
            return max((r.step for r in read_records(self.folder, lambda _: None)), default=-1)
        return -1

    def _make_up_for(self, device: Device, epoch: int) -> None:
        """Write or give up what the process before this one has not written: others wait for it.

        One commit is under way at a time: that of the epoch, or of the last one due before it.
        """
        every = self.every or epoch + 1
        last = epoch // every * every
        for step in (last, last - every):
            if step == epoch:
                self._commit(device)
            for name in (self.name, *self.also) if 0 <= step < epoch else ():
                if self.ledger.look(f"shard/{step}/{name}") is None:
                    self._miss(step, name, f"the process of {name} died")

    def _tell_event(self, event: str, step: int, facts: dict[str, object]) -> None:
        """Tell the supervisor, as a note: one that is older than events of devices keeps it."""
        self.ledger.post(f"event/{step}/{self.name}-{event}", json.dumps(facts))

    def _warn(self, text: str) -> None:
        super()._warn(text)
        if self.leads:
            self.warned += 1
            about: dict[str, object] = {
                "text": text.removeprefix("WARNING: ").removeprefix("warning: ")
            }
            self._tell_event("warned", self.warned, about)

    def _needed(self) -> tuple[str, ...]:
        """Keep what a replacement begins with, until all devices have a snapshot, or peers."""
        return (self.begun_with,) if self.control.epoch < 0 else ()

    def _gathered(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raise where the process before this one could begin with what is not whole any more.

        The others have begun: they say nothing of an older commit, and nobody must wait for that.
        """
        before = self.ledger.look(f"{what}/{self.name}")
        if before is not None and mine.get("broken") and not json.loads(before).get("broken"):
            raise CommitError(
                f"{mine['broken']}: the run has begun with this commit, and there is no snapshot "
                "yet: go on from the newest one with --resume",
                code="BX5169",
            )
        return super()._gathered(what, mine)

    def settle(self) -> None:
        """Wait for the commit that is being written, and meet the others anew meanwhile."""
        while self.thread is not None and not self.is_written:
            moved = self.control.wait_for_disk(lambda: self.is_written, self.transport.generation)
            if moved and self.transport.generation >= 0:
                self.transport.form()
            elif moved:
                break  # before the first meeting there is nobody to meet
        super().settle()

    def _commit(self, device: Device) -> None:
        if device.finished != self.begun and self._was_written(device.finished):
            self.begun = device.finished
            return
        super()._commit(device)

    def _own_notes(self) -> list[int]:
        """Return the commits that this device has written its part of, where the board has them."""
        found = (key.split("/") for key in tuple(self.control.board) if key.startswith("shard/"))
        return [int(number) for _, number, name in found if name == self.name]

    def _was_written(self, step: int) -> bool:
        """Whether the process before this one has done this device's part.

        Notes on old commits are dropped from the board; who has written a later one has done with
        those before it.
        """
        if any(number > step for number in self._own_notes()):
            return True
        report = self.ledger.look(f"shard/{step}/{self.name}")
        if report is None or {"missed", "fenced"} & set(json.loads(report)):
            return False
        return not self.leads or any(
            record.step >= step for record in read_records(self.folder, lambda _: None)
        )

    def _copy(self, device: Device, state: State) -> None:
        super()._copy(device, state)
        if self.also:
            from .state_parts import part_of_state  # only bundles with replicas have it
        for name, held in self.also.items():
            part = part_of_state(state, held)
            if len(self.images.get(name, b"")) < part.nbytes:
                self.images[name] = bytearray(part.nbytes)
            part.copy_into(self.images[name])

    def _write_part(self, step: int) -> None:
        for name, image in self.images.items():  # its own part comes last: then all are there
            said = self.written(name, image)
            self.ledger.post(f"{SHARD}/{step}/{name}", json.dumps(said))
        super()._write_part(step)

    def _write(self, state: State) -> None:
        self.is_written = False
        try:
            super()._write(state)
        finally:
            self.is_written = True
            self.control.wake()
