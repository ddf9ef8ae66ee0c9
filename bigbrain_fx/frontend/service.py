"""The other end of `client`: what every child process with torch does besides its work.

It ends with its parent, keeps stdin and stdout for the protocol, and reports what goes wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO

from bigbrain_fx.core import Stopwatch
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.runtime import (
    LIBRARIES,
    NeedsError,
    is_of_memory,
    load,
    memory_remedy,
    require_folder,
)

_PR_SET_PDEATHSIG = 1
BEFORE = "start, import torch"
"""Of a child's first message: what it did before; of later ones it is waiting."""


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, where it knows how to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def require_torch(*more: str) -> None:
    """Load torch, before anything that needs it, and other libraries.

    Raises:
        InputError: it cannot be.
    """
    require_here()
    with _telling_needs():
        load(*LIBRARIES, *more)


def require_here() -> None:
    """See that there is a working directory, which a child process with torch needs.

    Raises:
        InputError: it has been removed.
    """
    with _telling_needs():
        require_folder()


@contextmanager
def _telling_needs() -> Iterator[None]:
    try:
        yield
    except NeedsError as error:
        raise InputError(error.what, code=error.code, help=error.remedy) from error


def memory_error(error: BaseException) -> InputError | None:
    """Return what a user is told where memory has run out, as under a limit of it."""
    if not is_of_memory(error):
        return None
    first = str(error).partition("\n")[0]
    return InputError(
        "memory has run out",
        code="BX2101",
        notes=(first,) if first else (),
        help=memory_remedy(error),
    )


class Replies:
    """The pipe to the parent; the user's code prints to stderr from now on, and reads nothing.

    Attributes:
        requests: the parent's lines.
    """

    def __init__(self) -> None:
        end_with_parent()
        self.requests: IO[str] = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._watch = Stopwatch(with_children=True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def say(self, **message: object) -> None:
        """Send one message."""
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def reply(self, work: Callable[[], Mapping[str, object]], part: str = "work") -> bool:
        """Do some work and send its result, or what went wrong; return whether it went well.

        What it took is sent along as "spent"; the first time what lay before it, too.

        Args:
            work: gives the result.
            part: what it is called in a table of times.
        """
        before = self._watch.lap(BEFORE)
        try:
            require_torch()
            message = work()
        except BigBrainError as error:
            self.say(error=error.fields)
        except Exception as error:
            if (known := memory_error(error)) is not None:
                self.say(error=known.fields)
            else:
                self.say(internal=traceback.format_exc())
        else:
            self.say(**message, spent=[asdict(before), asdict(self._watch.lap(part))])
            return True
        return False
