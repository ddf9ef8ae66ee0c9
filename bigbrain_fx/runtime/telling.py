"""What a process prints: a full log or a reader that is gone stops no training.

This file is stdlib only.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO

from .coded import CodedError


def tell(text: str) -> None:
    """Print a line for people on stderr, if there is room for it."""
    show(text, sys.stderr)


def show(text: str, stream: TextIO) -> None:
    """Print a line, if there is room for it; never raises.

    Where nobody reads any more, whatever comes goes to nowhere: else it would fail once more, in a
    thread or when Python ends.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _let_go(stream)
    except ValueError:  # it is closed
        pass


def _let_go(stream: TextIO) -> None:
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def headline(error: BaseException, text: str | None = None) -> str:
    """Return what a terminal shows of an error: its code, and its own words or `text`."""
    said = str(error) if text is None else text
    return f"error[{error.code}]: {said}" if isinstance(error, CodedError) else f"error: {said}"


def note_code(error: BaseException) -> None:
    """Let a traceback end with the error's code; Python 3.10 has no notes."""
    if isinstance(error, CodedError) and hasattr(error, "add_note"):
        error.add_note(f"code: {error.code}")
