"""Messages by which a supervisor decides, as types, from a device's process.

Sentences are for people: none is read by a program. `runtime` and `supervisor` import nothing of
each other, so both have this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DISK, BATCH = "disk", "batch"  # what a process may wait for besides other devices
_OLDER = {"the disk": DISK, "the caller's next batch": BATCH}  # so bundles said it until 0.2.0


class Wait(NamedTuple):
    """For what a process waits: the device, or "", words for people, and the kind, or ""."""

    device: str
    text: str
    kind: str = ""


def wait_of(said: Sequence[str]) -> Wait:
    """Read a `Wait`."""
    found = Wait(*said)
    return found if found.kind else found._replace(kind=_OLDER.get(found.text, ""))


class LastWord(NamedTuple):
    """Why a process ends, by itself: words, exit code, the error's class and its code, if any."""

    text: str
    exit: int
    error: str = ""
    code: str = ""
    of_memory: bool = False

    @property
    def said(self) -> str:
        """Return the text of an event."""
        return f"{self.error}{self.code and f'[{self.code}]'}: {self.text}".removeprefix(": ")

    @property
    def shown(self) -> str:
        """Return the text of a terminal."""
        return f"error[{self.code}]: {self.text}" if self.code else self.text
