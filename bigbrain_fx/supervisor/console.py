"""Output of a run for people: lines that are dropped where nobody reads them any more."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from .policies import IS_WATCHED

if TYPE_CHECKING:
    from .aside import Aside


class AtOnce:
    """Make calls as they come: a reader that is stopped holds the run up; see `aside`."""

    dropped = 0

    def give(self, call: Callable[[], object]) -> None:
        """Make a call; what nobody reads is lost."""
        try:
            call()
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        """Nothing waits."""


def _aside() -> Aside | AtOnce:
    if not IS_WATCHED:
        return AtOnce()
    from .aside import Aside  # only bundles of --with watch have it

    return Aside()


class Console:
    """Lines to one of this process's streams, written aside where a bundle can.

    Args:
        stream: `sys.stdout` or `sys.stderr`; None, as Python has it where it is closed, takes all.
    """

    def __init__(self, stream: IO[str] | None, aside: Aside | AtOnce | None = None) -> None:
        self.stream = stream
        self.aside = aside or _aside()

    def say(self, line: str) -> None:
        """Let a line be written soon."""
        self.aside.give(lambda: _write(self.stream, f"{line}\n"))

    def close(self) -> int:
        """Wait for what was said, though not for ever; return how many lines were not written."""
        self.aside.close()
        return self.aside.dropped


def _write(stream: IO[str] | None, text: str) -> None:
    """Write past Python's own buffer: at its end Python would wait for a reader that is stopped."""
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except (OSError, ValueError):  # no file of the system: a test's, or a notebook's
        stream.write(text)
        stream.flush()
        return
    rest = text.encode(errors="replace")
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever started us has set it so
            select.select([], [fd], [])


def warn(text: str) -> None:
    """Say something on stderr, if anybody is there."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def hold_streams() -> None:
    """Let nothing be read, and what is written be lost, where a standard stream is closed.

    Else the next file that is opened would have its number, and take what is meant for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):
            if not _is_open(number):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  # it stays


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
