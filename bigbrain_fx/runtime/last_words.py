"""What a process says of the error that ends it, or that has broken a connection."""

from __future__ import annotations

from .coded import CodedError
from .limits import is_of_memory, told
from .protocol import LastWord

LONGEST_TEXT = 2_000  # characters of an error that travel


def last_word(error: BaseException, exit_code: int) -> LastWord:
    """Return what a process says of the error that ends it, short enough to travel."""
    code = error.code if isinstance(error, CodedError) else ""
    words = told(error)[:LONGEST_TEXT]
    return LastWord(words, exit_code, type(error).__name__, code, is_of_memory(error))


def said(error: BaseException) -> str:
    """Return an error as one line: its class, its code and its words."""
    return last_word(error, 1).said
