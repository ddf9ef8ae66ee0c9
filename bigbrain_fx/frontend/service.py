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
from collections.abc import Callable, Mapping
from typing import IO

from bigbrain_fx.errors import BigBrainError

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, where it knows how to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Replies:
    """The pipe to the parent; the user's code prints to stderr from now on, and reads nothing.

    Attributes:
        requests: the parent's lines.
    """

    def __init__(self) -> None:
        end_with_parent()
        self.requests: IO[str] = os.fdopen(os.dup(0), "r")
        self._replies = os.fdopen(os.dup(1), "w")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def say(self, **message: object) -> None:
        """Send one message."""
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def reply(self, work: Callable[[], Mapping[str, object]]) -> bool:
        """Do some work and send its result, or what went wrong; return whether it went well."""
        try:
            message = work()
        except BigBrainError as error:
            self.say(error=error.fields)
        except Exception:
            self.say(internal=traceback.format_exc())
        else:
            self.say(**message)
            return True
        return False
