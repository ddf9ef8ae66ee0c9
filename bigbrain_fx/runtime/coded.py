"""Errors with a code: each place that raises one has its own (docs/reference/errors.md)."""

from __future__ import annotations


class CodedError(Exception):
    """Report something to the user, with the code of the place that raises it."""

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


class InputError(CodedError):
    """Report what a run was given and cannot use; for the user to act on."""


class MisuseError(CodedError, RuntimeError):
    """Report a bundle, or a part of one, that is used otherwise than it can be."""
