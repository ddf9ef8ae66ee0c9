"""Output of a run for people: lines that are dropped where nobody reads them any more."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeAlias

from .policies import IS_WATCHED

if TYPE_CHECKING:
    from .aside import AsideConsole


class Console:
    """Lines to one of this process's streams, as they come; `aside` has one that nobody holds up.

    Args:
        stream: `sys.stdout` or `sys.stderr`; None, as Python has it where it is closed, takes all.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream, self.dropped = stream, 0

    def say(self, line: str) -> None:
        """Write a line past Python's own buffer, which its end would flush; else it is lost."""
        try:
            if self.stream is not None:
                os.write(self.stream.fileno(), f"{line}\n".encode(errors="replace"))
        except OSError:
            self.dropped += 1

    def close(self) -> int:
        """Return how many lines were not written."""
        return self.dropped


AnyConsole: TypeAlias = "Console | AsideConsole"


def console_of(stream: IO[str] | None) -> AnyConsole:
    """Return the console of a stream, which writes aside where a bundle can."""
    if not IS_WATCHED:
        return Console(stream)
    from .aside import AsideConsole  # only bundles of --with watch have it

    return AsideConsole(stream)


def warn(text: str) -> None:
    """Say something on stderr, if anybody is there."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def hold_streams() -> None:
    """Let nothing be read, and what is written be lost, where a standard stream is closed.

    Else the next file that is opened would have its number, and take what is meant for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the lowest number that is free is this stream's
            nothing = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(nothing, "w" if number else "r"))  # noqa: SIM115  # it stays
