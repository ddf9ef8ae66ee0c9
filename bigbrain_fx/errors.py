"""The errors a user may see; each says what was expected, what was found, where, and what to do.

Each place that raises one has a code of its own, `code="BX1203"`: tests, scripts and other code go
by it, so that sentences can change. The codes are listed in docs/reference/errors.md. Plug-ins of
others need none.

This module knows nothing of torch or the terminal: `cli` decides how an error is shown.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

_SAID = "what", "code", "at", "notes", "help", "nearest"


class BigBrainError(Exception):
    """Stop the command for a reason that the user can act on.

    Args:
        what: one sentence: what went wrong, what was expected and what was found.
        code: of the place that raises it, such as "BX1203"; a letter after the number tells apart
            places of one kind of fault ("BX0160c"). None: a plug-in of a third party raised it.
        at: where: `model.py:31` or `cluster.json: devices[2].memory`.
        notes: the arithmetic or the circumstances, one line each.
        help: one edit or one command that mends it.

    Attributes:
        of_code: the user's code runs, and only splitting it is refused. See `about_code`.
        apart: path of the module whose result a bundle has otherwise than plain PyTorch, where a
            few steps of both have shown it.
    """

    exit_code = 2
    of_code = False
    apart: str | None = None

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        at: str | None = None,
        notes: tuple[str, ...] = (),
        help: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code
        self.at = at
        self.notes = notes
        self.help = help

    @property
    def fields(self) -> dict[str, object]:
        """Fields that a child process sends its parent, for `from_fields`."""
        where = {"code": self.code, "at": self.at}
        said = {"what": self.what, "notes": self.notes, "help": self.help}
        return {"kind": type(self).__name__, "of_code": self.of_code, **where, **said}

    @property
    def family(self) -> str | None:
        """The code's number: several places may report one kind of fault."""
        return self.code and self.code[:6]

    @property
    def headline(self) -> str:
        """The text for a terminal: `error[BX1203]: ...`, and the lines of `str` below it."""
        return f"error[{self.code}]: {self}" if self.code else f"error: {self}"

    def __str__(self) -> str:
        lines = [self.what]
        if self.at:
            lines.append(f"  at: {self.at}")
        lines.extend(f"  note: {note}" for note in self.notes)
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class InputError(BigBrainError):
    """Report a file or an option that cannot be used (exit code 2)."""


class NoPlanError(BigBrainError):
    """Report that no plan satisfies the limits, with the arithmetic per device (exit code 3).

    Attributes:
        nearest: op -> device: what a partitioner refuses by an upper bound, and may fit after all.
    """

    exit_code = 3
    nearest: Mapping[str, str] | None

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        at: str | None = None,
        notes: tuple[str, ...] = (),
        help: str | None = None,
        nearest: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, code=code, at=at, notes=notes, help=help)
        self.nearest = nearest

    def told(self, *notes: str, help: str | None = None) -> NoPlanError:
        """Return the same with more of the circumstances, or another remedy."""
        every, remedy = (*self.notes, *notes), help or self.help
        more = {"notes": every, "help": remedy, "nearest": self.nearest}
        return type(self)(self.what, code=self.code, at=self.at, **more)  # type: ignore[arg-type]

    @classmethod
    def later(cls, make: Callable[[], NoPlanError]) -> NoPlanError:
        """Return what this makes, made when it is first read: a search reads few of its refusals.

        The arithmetic of one is a search by itself.
        """
        error = cls.__new__(cls)
        error.__dict__["_make"] = make
        return error

    if not TYPE_CHECKING:  # a typo is one for mypy

        def __getattr__(self, name: str) -> object:
            """Make what was left for later, at the first look at any of it."""
            if name not in _SAID or "_make" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            made = self.__dict__.pop("_make")()
            for each in _SAID:
                self.__dict__.setdefault(each, getattr(made, each))
            return self.__dict__[name]


class SplitWarning(UserWarning):
    """Warn of what a split or an estimate does otherwise than the user may expect."""


def warn_caller(note: str) -> None:
    """Warn of a split, at the caller's own line: the nearest outside of bigbrain_fx.

    Python's contextlib counts as ours.
    """
    ours = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(note, SplitWarning, stacklevel=level)


class FormatWarning(UserWarning):
    """Warn of a file of an earlier format, which is read."""


class CaptureError(BigBrainError):
    """Report that the model cannot be traced, with the user's line (exit code 4).

    Attributes:
        inside: the module that it is about, or its path or class, where that is known.
    """

    exit_code = 4
    inside: object = None


class VerificationError(BigBrainError):
    """Report that a bundle does not compute what the model computes (exit code 5)."""

    exit_code = 5


class ScheduleError(BigBrainError):
    """Report programs that cannot run (exit code 1).

    `bigbrain_fx.plan.schedule.faults` has the named faults.
    """

    exit_code = 1


def from_fields(fields: Mapping[str, Any]) -> BigBrainError:
    """Return the error that a child process has met, to raise it here."""
    kinds = InputError, NoPlanError, CaptureError, VerificationError, ScheduleError
    kind = {each.__name__: each for each in kinds}.get(fields["kind"], BigBrainError)
    notes = tuple(map(str, fields["notes"]))
    where = {"code": fields["code"], "at": fields["at"]}
    error = kind(str(fields["what"]), **where, notes=notes, help=fields["help"])
    error.of_code = bool(fields.get("of_code"))
    return error


@contextmanager
def about_code() -> Iterator[None]:
    """Mark each error raised inside as one about the user's code, which runs without a split."""
    try:
        yield
    except BigBrainError as error:
        error.of_code = True
        raise


@contextmanager
def os_error_as(what: str, *, code: str, help: str, at: str | Path | None = None) -> Iterator[None]:
    """Tell an OSError within as an InputError: what could not be done, and the system's reason.

    `at` is an option; or the place, where the system names no file.
    """
    try:
        yield
    except OSError as error:
        place = at if isinstance(at, str) else error.filename or at
        where = None if place is None or f"{place}" in what else f"{place}"
        raise InputError(
            f"{what}: {error.strerror or error}", code=code, at=where, help=help
        ) from error
