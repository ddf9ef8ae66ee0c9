"""Refusals as data: a sentence with places for facts, its code, and one remedy.

HOLDS_NONE = Refusal("the {kind} holds no parameter", code="BX2158", help="take them from ...")
raise HOLDS_NONE.error("model.py:31", kind="Muon")
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.errors import CaptureError, InputError


@dataclass(frozen=True)
class _Row:
    """One row of a table of refusals.

    Attributes:
        what: one sentence; `{name}` stands for a fact.
        code: of the row.
        help: the remedy, with facts likewise.
        notes: the circumstances.
    """

    what: str
    code: str
    help: str
    notes: tuple[str, ...] = ()


class Refusal(_Row):
    """A row for an input that cannot be used."""

    def error(self, at: str | None, /, *notes: str, **facts: object) -> InputError:
        """Return the error of this row, its facts filled in."""
        what, help_ = self.what.format(**facts), self.help.format(**facts)
        said = (*self.notes, *filter(None, notes))
        return InputError(what, code=self.code, at=at, notes=said, help=help_)


class TraceRefusal(_Row):
    """A row for code that no trace can hold."""

    def error(
        self, at: str | None, /, *notes: str, inside: object = None, **facts: object
    ) -> CaptureError:
        """Return the error of this row, its facts and notes filled in.

        Args:
            at: the user's line.
            notes: torch's message, or the line's text; empty ones are left out.
            inside: the module at fault.
            facts: by name.
        """
        what, help_ = self.what.format(**facts), self.help.format(**facts)
        what = what.removesuffix(": ")  # no line of the user's is known
        said = (*self.notes, *filter(None, notes))
        error = CaptureError(what, code=self.code, at=at or None, notes=said, help=help_)
        error.inside = inside
        return error


# Warnings of a capture that later work may answer: by these words they are found again.
TOO_LARGE = "too large to compare with the module here; `verify` compares them"
OF_ONE_LENGTH = "the trace holds for batches as long as the longest only"
