"""Errors with a code, and the line that shows one: `error[BX5012]: ...`.

Each place that raises one has a code of its own, which stays when the sentence changes; bigbrain-fx
lists them in docs/reference/errors.md.
"""

from __future__ import annotations


class CodedError(Exception):
    """Report something to the user.

    Args:
        what: the sentence.
        code: of the place that raises it.
    """

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


def headline(error: BaseException, text: str | None = None) -> str:
    """Return what a terminal shows of an error: its code, and its own words or `text`."""
    said = str(error) if text is None else text
    return f"error[{error.code}]: {said}" if isinstance(error, CodedError) else f"error: {said}"
