"""The other end of `client`: duties of every child process with torch besides its work.

A child loads torch or reports why it cannot, ends with its parent, keeps stdin and stdout for the
protocol, and reports failures.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import IO

from bigbrain_fx.core import Stopwatch
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.runtime import MEMORY, is_of_memory, memory_remedy

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
    require_folder()
    load(*LIBRARIES, *more)


def memory_error(error: BaseException) -> InputError | None:
    """Return the user's error where memory has run out, as under a limit of it."""
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
        """Do some work and send its result, or its error; return whether it went well.

        The seconds of the work are sent along as "spent"; the first reply includes the start-up
        time.

        Args:
            work: gives the result.
            part: name of the work in a table of times.
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


# --------------------------------------------------------------------------- what it needs to begin

LIBRARIES = ("torch", "safetensors.torch")


def require_folder() -> None:
    """See that the working directory is there: without one, MKL ends the process.

    Raises:
        InputError: it has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            "the working directory has been removed", code="BX2002", help="cd to one that is there"
        ) from error


def load(*names: str) -> None:
    """Import modules.

    Raises:
        InputError: one cannot be.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise _told(name.partition(".")[0], error) from error


def _told(name: str, error: BaseException) -> InputError:
    if is_of_memory(error) or (isinstance(error, SystemError) and _is_limited()):
        what = f"{name} cannot be loaded, for memory has run out"
        return InputError(what, code="BX2003", help=MEMORY)
    if isinstance(error, ModuleNotFoundError):
        version = ".".join(map(str, sys.version_info[:2]))
        remedy = "start it with the Python that has torch and safetensors, or install them there"
        what = f"{sys.executable} (Python {version}) has no {error.name}"
        return InputError(what, code="BX2045", help=remedy)
    lines = [line for line in str(error).splitlines() if line.strip()]
    what = f"{name} cannot be loaded ({type(error).__name__}: {(lines or ['?'])[0]})"
    if "log settings" in str(error) and "TORCH_LOGS" in os.environ:
        return InputError(what, code="BX2048", help="unset TORCH_LOGS, or see TORCH_LOGS=help")
    remedy = f'`{sys.executable} -c "import {name}"` must work first'
    return InputError(what, code="BX2049", help=remedy)


def _is_limited() -> bool:
    """Whether this process may have less memory than there is: C code fails in many ways then."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
