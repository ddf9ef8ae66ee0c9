"""How devices tell each other what they have written: a board where each note is read by all.

What is said once stays. Who waits for a note does not keep others from writing theirs.
"""

from __future__ import annotations

import threading
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
    """A ledger in the store that all processes share; its own connection to it."""

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


class LocalLedger:
    """A ledger for the devices of one process."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.said: dict[str, str] = {}
        self.claimed: set[str] = set()
        self.news = threading.Condition()

    def post(self, key: str, text: str) -> None:
        """Say something, once."""
        with self.news:
            self.said[key] = text
            self.news.notify_all()

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.said.get(key)

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""
        with self.news:
            if not self.news.wait_for(lambda: key in self.said, self.deadline_s):
                raise TimeoutError(f"waited {self.deadline_s:g} s for {key}")
            return self.said[key]

    def claim(self, key: str) -> bool:
        """Return whether this is the first to ask for something."""
        with self.news:
            is_first = key not in self.claimed
            self.claimed.add(key)
            return is_first
