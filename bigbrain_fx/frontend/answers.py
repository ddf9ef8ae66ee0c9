"""Answers that a user gives by hand: "model.py:31=true". Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.errors import InputError


def read_answers(texts: Sequence[str]) -> dict[str, bool]:
    """Read which conditions hold: place -> true or false.

    Args:
        texts: "model.py:31=true", "model.py:48=false".

    Raises:
        InputError: another form, or both answers for one place.
    """
    found: dict[str, bool] = {}
    for text in texts:
        place, _, answer = text.partition("=")
        file, _, line = place.rpartition(":")
        if not (file and line.isdigit() and answer.lower() in ("true", "false")):
            raise InputError(
                f"expected FILE:LINE=true or FILE:LINE=false, found {text!r}",
                code="BX2000",
                help="--assume model.py:31=false",
            )
        if found.setdefault(place, answer.lower() == "true") != (answer.lower() == "true"):
            raise InputError(
                f"{place} is assumed to be true and false", code="BX2001", help="give one of them"
            )
    return found
