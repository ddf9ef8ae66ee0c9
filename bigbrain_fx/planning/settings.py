"""`--set work=9`: an option of a partitioner, read as its class declares it. It makes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from inspect import Parameter

from bigbrain_fx.errors import InputError
from bigbrain_fx.planning.given import Given, label
from bigbrain_fx.planning.registry import parameters_of

Choice = bool | int | float | str | None
CHOSEN_ELSEWHERE = {
    "micro_batches": "--micro-batches says it",
    "seed": "--seed says it",
    "in_flight": "--schedule decides it",
}


def settable(given: Given) -> dict[str, Parameter]:
    """Return the options of a partitioner that nothing else chooses, by name."""
    found = parameters_of("partitioner", given)
    return {name: each for name, each in sorted(found.items()) if name not in CHOSEN_ELSEWHERE}


def read_settings(given: Given, texts: Sequence[str]) -> tuple[tuple[str, Choice], ...]:
    """Read "work=9", "use_all=true".

    Raises:
        InputError: no such option, or no such value.
    """
    return tuple(dict(_read(given, text) for text in texts).items())


def _read(given: Given, text: str) -> tuple[str, Choice]:
    name, equals, value = text.partition("=")
    known = settable(given) if label(given) != "auto" else {}
    if name in known and equals:
        return name, _value(name, value, known[name].default)
    shown = ", ".join(f"{key}={_shown(each)}" for key, each in known.items())
    takes = f"{label(given)} takes {shown}" if known else f"{label(given)} has nothing to set"
    if not equals:
        raise InputError(
            f"expected NAME=VALUE, found {text!r}", code="BX1115", at="--set", help=takes
        )
    raise InputError(
        f"the partitioner '{label(given)}' has no option '{name}' to set",
        code="BX1116",
        at="--set",
        help=CHOSEN_ELSEWHERE.get(name, takes),
    )


def _shown(known: Parameter) -> str:
    return "..." if known.default is Parameter.empty else json.dumps(known.default, default=str)


def _value(name: str, text: str, default: object) -> Choice:
    """Read a value of the default's type; a default that has none takes any JSON, or a word."""
    try:
        found: Choice = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    if not isinstance(found, bool | int | float | str | None):
        found = text
    if isinstance(found, float) and not math.isfinite(found):
        raise InputError(f"expected a number, found {text}", code="BX1117", at=f"--set {name}")
    if default is None or default is Parameter.empty or _fits(found, default):
        return _not_below(found, default, name)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    wanted = words.get(type(default), "a word")
    raise InputError(
        f"expected {wanted}, found {text!r}",
        code="BX1118",
        at=f"--set {name}",
        help=f"as it is by default: --set {name}={json.dumps(default, default=str)}",
    )


def _not_below(found: Choice, default: object, name: str) -> Choice:
    """Refuse a number below zero where the default is none: counts, shares and seconds are not."""
    numbers = int | float
    if isinstance(found, numbers) and found < 0 and isinstance(default, numbers) and default >= 0:
        raise InputError(
            f"expected 0 or more, found {found}",
            code="BX1119",
            at=f"--set {name}",
            help=f"--set {name}={default}",
        )
    return found


def _fits(found: object, default: object) -> bool:
    if isinstance(default, bool) or isinstance(found, bool):
        return isinstance(default, bool) and isinstance(found, bool)
    if isinstance(default, float):
        return isinstance(found, int | float)
    return isinstance(found, type(default))
