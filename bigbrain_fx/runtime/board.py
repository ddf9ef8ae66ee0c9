"""A ledger that the supervisor keeps, for a process that replaces another: it knows what that said.

No device waits for a dead one: what the dead one owes, its replacement does or gives up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from .committing import Committer, Ledger
from .loading import Loadable
from .packets import HeadLostError
from .protocol import DISK
from .records import CommitError, Record, Told, part_key, told_of
from .replay import ReplayTransport

if TYPE_CHECKING:
    from .checked_device import CheckedDevice
    from .state import State


class Board(Ledger):
    """What devices have said; see `Ledger`.

    Args:
        transport: of the device: its thread meets the others anew while it waits for the disk.
        deadline_s: longest wait for a word; None: as long as it takes, with the others met anew.
    """

    def __init__(self, transport: ReplayTransport, deadline_s: float | None = None) -> None:
        self.transport, self.control = transport, transport.control
        self.deadline_s = deadline_s

    @property
    def may_begin_again(self) -> bool:
        """Whether some device has no snapshot, and no peer, yet."""
        return self.control.epoch < 0

    def post(self, key: str, text: str) -> None:
        """Say something; what was said under the key before is replaced."""
        self.control.post(key, text)

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.control.board.get(key)

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is, whoever dies meanwhile."""
        board, control = self.control.board, self.control
        if self.deadline_s is None:
            self.until(lambda: key in board)
            return board[key]
        with control.changed:
            control.changed.wait_for(
                lambda: key in board or control.last is not None, self.deadline_s
            )
            if key in board:
                return board[key]
        if control.last is not None:
            raise HeadLostError("the supervisor that decides is lost", code="BX5168")
        raise TimeoutError(f"waited {self.deadline_s:g} s for {key}")

    def has_part(self, device: str, step: int) -> bool:
        """Whether the process before this one has done a device's part of a commit.

        Notes on old commits are dropped from the board; who has written a later one has done with
        those before it.
        """
        found = (key.split("/") for key in tuple(self.control.board) if key.startswith("shard/"))
        if any(int(number) > step for _, number, name in found if name == device):
            return True
        said = self.look(part_key(step, device))
        return said is not None and told_of(said).is_written

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait for the disk; before the first meeting there is nobody to meet meanwhile."""
        about = "the disk", DISK
        while not is_done() and not self.control.until(is_done, self.transport.generation, *about):
            if self.transport.generation < 0:
                return
            self.transport.form()

    def wake(self) -> None:
        """Let `until` look again."""
        self.control.wake()

    def report(self, event: str, device: str, step: int, facts: Mapping[str, object]) -> bool:
        """Tell the supervisor, as a note: one that is older than events of devices keeps it."""
        self.post(f"event/{step}/{device}-{event}", json.dumps(facts))
        return False


class SupervisedCommitter(Committer):
    """A device's part in commits, of which a process before this one may have done some."""

    ledger: Board
    is_written = True  # by its thread

    @property
    def needed(self) -> Collection[str]:  # type: ignore[override]
        """The commit that the run has begun with, as long as a process may yet start from it."""
        return (self.begun_with,) if self.ledger.may_begin_again else ()

    def _gathered(self, record: Record, mine: Loadable) -> list[Loadable]:
        before = self.ledger.look(f"load/{record.folder}/{self.name}")
        if before is not None and mine.broken and not Loadable(**json.loads(before)).broken:
            # the others have begun: they say nothing of an older commit
            raise CommitError(
                f"{mine.broken}: the run has begun with this commit, and there is no snapshot "
                "yet: go on from the newest one with --resume",
                code="BX5169",
            )
        return super()._gathered(record, mine)

    def settle(self) -> None:
        """Wait for the commit that is being written, and meet the others anew meanwhile."""
        self.ledger.until(lambda: self.is_written)
        super().settle()

    def commit(self, device: CheckedDevice) -> None:
        """Begin a commit of where a device is, unless its part is written."""
        step = device.finished
        if self.ledger.has_part(self.name, step) and (not self.leads or self.newest() >= step):
            self.begun = step
        super().commit(device)

    def _copy(self, device: CheckedDevice, state: State) -> None:
        self.is_written = False
        super()._copy(device, state)

    def _write(self, state: State) -> None:
        try:
            super()._write(state)
        finally:
            self.is_written = True
            self.ledger.wake()


def make_up_for(committer: Committer, device: CheckedDevice, names: Iterable[str]) -> None:
    """Write or give up what the process before this one has not written: others wait for it.

    One commit is under way at a time: that of the step where the device is, or of the last one due
    before it.

    Args:
        committer: of the device.
        device: at its snapshot.
        names: of the devices whose parts it writes.
    """
    for step in last_due(committer, device.finished):
        if step == device.finished:
            committer.commit(device)
            continue
        for name in names:
            if committer.ledger.look(part_key(step, name)) is None:
                miss(committer.ledger, step, name, f"the process of {name} died")


def last_due(committer: Committer, step: int) -> list[int]:
    """Return the last two steps, at most, up to one at which there is a commit."""
    every = committer.every or step + 1
    last = step // every * every
    return [due for due in (last, last - every) if due >= 0]


def miss(ledger: Ledger, step: int, name: str, why: str) -> None:
    """Say that a device's part of a commit will not be written."""
    ledger.post(part_key(step, name), Told(missed=f"{why} before its part was written").text)
