"""How devices tell each other what they have written: a board where each note is read by all.

What is said once stays. Who waits for a note does not keep others from writing theirs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Ledger(Protocol):
    """Where devices tell each other what they have done."""

    def post(self, key: str, text: str) -> None:
        """Say something, once."""

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""

    def claim(self, key: str) -> bool:
        """Return whether this is the first to ask for something."""


class StoreLedger:
    """A ledger in a store that all processes, or the threads of one, share."""

    def __init__(self, store: Store, deadline_s: float) -> None:
        self.store: Any = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=deadline_s))

    def post(self, key: str, text: str) -> None:
        """Say something, once."""
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
