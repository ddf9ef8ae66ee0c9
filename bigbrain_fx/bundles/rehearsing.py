"""Whether a bundle that was just written trains what the user's own loop trains.

A few steps of both, in the process that has the captured model: see `verification.rehearsal`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.errors import BigBrainError, CaptureError, about_code, from_fields
from bigbrain_fx.plan import Plan

CAPTURE_CHILD = "bigbrain_fx.verification.capture_child"
LIMIT_S = 90.0
OFF = "BIGBRAIN_NO_REHEARSAL"  # a variable of the environment; any text switches rehearsals off


def is_off() -> bool:
    """Whether the environment asks for no rehearsals."""
    return bool(os.environ.get(OFF))


class Rehearsal:
    """A few steps of a bundle beside the user's loop; `check` runs before it is in its place.

    Attributes:
        said: what was compared, and how far apart it is; empty where nothing is.
        missing: why nothing was compared; empty where nothing is to be.
        failed: whether they are different.
        apart: path of the module whose result is another one, where that is known.
    """

    def __init__(self, found: FoundModel, plan: Plan) -> None:
        self.rehearse = found.rehearse if plan.mode == "train" else None
        self.help = _OF_FILES if found.session is not None else _OF_MODULES
        self.said = self.missing = ""
        self.failed = False
        self.apart: str | None = None

    def check(self, bundle: Path) -> None:
        """Compare.

        Raises:
            CaptureError: bundle and loop train something else.
            BigBrainError: the bundle cannot be trained on the user's data.
        """
        if self.rehearse is None:
            return
        self.failed = True
        answer = self.rehearse(bundle, LIMIT_S)
        self.apart = cast("str | None", answer.get("apart"))
        if "refused" in answer:
            with about_code():
                raise from_fields(cast("Mapping[str, Any]", answer["refused"]))
        checks = cast("Sequence[Mapping[str, Any]]", answer["checks"])
        wrong = [check for check in checks if check["passed"] is False]
        if wrong:
            with about_code():
                raise _different(wrong, cast("str | None", answer.get("set")), self.help)
        self.failed = False
        self.missing = _missing(answer, checks)
        self.said = "" if self.missing else str(checks[0]["detail"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user."""
        return (f"not compared with your own loop: {self.missing}",) if self.missing else ()


def _missing(answer: Mapping[str, object], checks: Sequence[Mapping[str, Any]]) -> str:
    """Say why nothing was compared."""
    unseen = [str(check["detail"]) for check in checks if check["passed"] is None]
    return str(answer.get("why") or "") or (unseen[0] if unseen else "")


def _different(
    wrong: Sequence[Mapping[str, Any]], of_set: str | None, remedy: str
) -> BigBrainError:
    """Return the error of links that do not hold; `of_set` is a line that makes a set or a hash."""
    return CaptureError(
        f"a bundle of this model trains something else than your own loop: {wrong[0]['detail']}",
        code="BX3169",
        at=of_set,
        notes=tuple(f"{check['name']}: {check['detail']}" for check in wrong),
        help=_OF_SETS if of_set else remedy,
    )


_OF_FILES = (
    "set what a later step goes by at the top of the file, in a buffer of the model, or "
    "in what batches() yields; not in model(), another function, or a plain attribute"
)
_OF_MODULES = (
    "keep what a later step goes by in a buffer of the module, or in the batch; or write a "
    "model.py with model(), example_batch(), loss and optimizer, and split that: it can be run "
    "whole on one device"
)
_OF_SETS = (
    "the order of a set of texts, and hash() of one, are other ones in each process: sort it, as "
    "in sorted(set(words)); for hash(text) take zlib.crc32(text.encode())"
)
