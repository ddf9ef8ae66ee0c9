"""What the devices of a run have said, by key: in torch's store, which all of them share.

`board.Board` is the same, kept by a supervisor: it also knows what a dead process has said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .limits import tell

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Said = TypeVar("Said")


class Ledger:
    """What devices have said, by key.

    Args:
        store: of all processes, or of the threads of one.
        deadline_s: longest wait for a word.
        as_json: whoever started this process reads events, as JSON, from what it writes.
    """

    is_beginning = False  # a process may yet start where the run began

    def __init__(self, store: Store, deadline_s: float, *, as_json: bool = False) -> None:
        self.store: Any = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=deadline_s))
        self.as_json = as_json

    def post(self, key: str, text: str) -> None:
        """Say something."""
        self.store.set(f"commits/{key}", text)

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.wait(key) if self.store.check([f"commits/{key}"]) else None

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""
        return str(self.store.get(f"commits/{key}").decode())

    def claim(self, key: str) -> bool:
        """Return whether this is the first to ask for something."""
        return bool(self.store.add(f"commits/claim/{key}", 1) == 1)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Be there for the others until this process has done something; here they need nothing."""

    def wake(self) -> None:
        """Let `until` look again."""

    def has_part(self, device: str, step: int) -> bool:
        """Whether a process before this one has written a device's part of a checkpoint."""
        return False

    def report(self, event: str, device: str, step: int, facts: Mapping[str, object]) -> bool:
        """Tell who started the run of an event; return whether people hear it from there alone."""
        if self.as_json:
            tell(json.dumps({"event": event, "device": device, **facts}))
        return self.as_json


def part_key(step: int, device: str) -> str:
    """Return the key under which a device says how its part of a checkpoint went."""
    return f"shard/{step}/{device}"


def text_of(said: Any) -> str:  # noqa: ANN401  # any frozen record
    """Return a frozen record as the text that a ledger keeps."""
    return json.dumps(asdict(said))


def read_as(kind: Callable[..., Said], text: str) -> Said:
    """Return the record of which `text_of` made a text."""
    return kind(**json.loads(text))
