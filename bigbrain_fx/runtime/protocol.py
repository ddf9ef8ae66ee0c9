"""What a device's process and its supervisor tell each other where it decides something, in types.

Sentences are for people: none is read by a program. `runtime` and `supervisor` import nothing of
each other, so both have this file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

DISK, BATCH = "disk", "batch"  # what a process may wait for besides other devices
OF_BATCH, OF_COPIES = "batch", "copies"  # what devices must have alike


class Wait(NamedTuple):
    """For what a process waits: the device, or "", words for people, and the kind, or ""."""

    device: str
    text: str
    kind: str = ""


class Subject(NamedTuple):
    """What devices compare: the batch of a step, or their copies `of` weights after it."""

    kind: str
    step: int
    of: str = ""

    @property
    def key(self) -> str:
        """The name under which they do; `subject_of` reads it."""
        return f"{self.kind}/{self.step}/{self.of}"

    @property
    def text(self) -> str:
        """It in words."""
        if self.kind == OF_BATCH:
            return f"the batch of step {self.step}"
        return f"the copies of {self.of} after step {self.step}" if self.kind else self.of


class LastWord(NamedTuple):
    """Why a process ends, by itself: words, exit code, the error's class and its code, if any."""

    text: str
    exit: int
    error: str = ""
    code: str = ""
    of_memory: bool = False

    @property
    def said(self) -> str:
        """It as an event has it."""
        return f"{self.error}{self.code and f'[{self.code}]'}: {self.text}".removeprefix(": ")

    @property
    def shown(self) -> str:
        """It as a terminal shows it."""
        return f"error[{self.code}]: {self.text}" if self.code else self.text


_OLDER_WAITS = {"the disk": DISK, "the caller's next batch": BATCH}  # of bundles until 0.2.0
_OLDER = re.compile(r"the (batch|copies) of (?:(.+) after )?step (\d+)")


def wait_of(said: Sequence[str]) -> Wait:
    """Read a `Wait`."""
    found = Wait(*said)
    return found if found.kind else found._replace(kind=_OLDER_WAITS.get(found.text, ""))


def subject_of(key: str) -> Subject:
    """Read the key of a `Subject`; what is none is a subject of no step, in its own words."""
    kind, _, rest = key.partition("/")
    step, _, of = rest.partition("/")
    if kind in (OF_BATCH, OF_COPIES) and step.isdigit():
        return Subject(kind, int(step), of)
    older = _OLDER.fullmatch(key)
    return Subject(older[1], int(older[3]), older[2] or "") if older else Subject("", -1, key)
