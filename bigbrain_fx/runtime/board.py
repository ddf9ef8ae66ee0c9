"""A ledger that the supervisor keeps, for a process that replaces another: it knows what that said.

No device waits for a dead one: what the dead one owes, its replacement does or gives up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from .checkpoint_format import Part
from .checkpoint_options import Ledger, part_key, read_as, text_of
from .packets import HeadLostError
from .protocol import DISK
from .replay import ReplayTransport

if TYPE_CHECKING:
    from .checked_device import CheckedDevice
    from .checkpoints import Checkpoints


class Board(Ledger):
    """Statements of devices; see `Ledger`.

    Args:
        transport: of the device: its thread meets the others anew while it waits for the disk.
        deadline_s: longest wait for a word; None: as long as it takes, with the others met anew.
    """

    def __init__(self, transport: ReplayTransport, deadline_s: float | None = None) -> None:
        self.transport, self.control = transport, transport.control
        self.deadline_s = deadline_s

    @property
    def is_beginning(self) -> bool:  # type: ignore[override]
        """Whether some device has no snapshot, and no peer, yet."""
        return self.control.epoch < 0

    def post(self, key: str, text: str) -> None:
        """Say something; what was said under the key before is replaced."""
        self.control.post(key, text)

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.control.board.get(key)

    def wait(self, key: str) -> str:
        """Return a report as soon as it is there, even if a process dies meanwhile."""
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
        return said is not None and not read_as(Part, said).why

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


def make_up_for(parts: Checkpoints, device: CheckedDevice, names: Iterable[str]) -> None:
    """Write or give up what the process before this one has not written: others wait for it.

    One commit is under way at a time: that of the step where the device is, or of the last one due
    before it.

    Args:
        parts: of the device.
        device: at its snapshot.
        names: of the devices whose parts it writes.
    """
    for step in last_due(parts, device.finished):
        if step == device.finished:
            parts.commit(device)
            continue
        for name in names:
            if parts.ledger.look(part_key(step, name)) is None:
                miss(parts.ledger, step, name, f"the process of {name} died")


def last_due(parts: Checkpoints, step: int) -> list[int]:
    """Return the last two steps, at most, up to one at which there is a commit."""
    every = parts.every or step + 1
    last = step // every * every
    return [due for due in (last, last - every) if due >= 0]


def miss(ledger: Ledger, step: int, name: str, why: str) -> None:
    """Say that a device's part of a commit will not be written."""
    ledger.post(part_key(step, name), text_of(Part(why=f"{why} before its part was written")))
