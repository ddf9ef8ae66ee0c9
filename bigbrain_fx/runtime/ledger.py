"""Where devices tell each other what they have done: here a store of torch's that all share.

With a supervisor it is `board.Board`, which has the same methods: there a process that takes over a
device finds what the one before it has said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .telling import tell

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Ledger:
    """What devices have said, by key.

    Args:
        store: of all processes, or of the threads of one.
        deadline_s: longest wait for a word.
        as_json: whoever started this process reads events, as JSON, from what it writes.
    """

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

    def report(self, event: str, device: str, step: int, facts: Mapping[str, object]) -> bool:
        """Tell who started the run of an event; return whether people hear it from there alone."""
        if self.as_json:
            tell(json.dumps({"event": event, "device": device, **facts}))
        return self.as_json
