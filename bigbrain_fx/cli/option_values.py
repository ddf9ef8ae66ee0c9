"""Texts of options to numbers, ratios and `Options`. It declares no option."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from bigbrain_fx.plan import Goals, Options

_MOST = 1e30


def located(model: str, choices: dict[str, Any]) -> str:
    """Return MODEL with what `model_options` chose; take that out of the choices.

    Raises:
        InputError: there is no such file, or it is a model file and something was chosen.
    """
    from bigbrain_fx.frontend import resolved

    words = {name: choices.pop(name) for name in ("batch", "seq", "dtype")}
    given = any(value is not None for value in words.values())
    return resolved(model, **words)[1] if given else model


def read_rows(text: str | None) -> tuple[int, ...]:
    """Read "4,8"; nothing is an empty tuple.

    Raises:
        InputError: these are no positive numbers.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"expected positive numbers, found {text!r}", code="BX3503", at="--rows", help="4,8"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def read_number(text: str | None, at: str) -> int | None:
    """Read "2" or "auto"; None is what was not said, and 0 is auto.

    Raises:
        InputError: it is neither.
    """
    if text in (None, "auto"):
        return None if text is None else 0
    assert text is not None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(
            f"expected a number or auto, found {text!r}", code="BX3504", at=at, help=f"{at} 2"
        )
    return int(text)


def read_members(count: int | None, text: str | None) -> tuple[int, ...]:
    """Return the shares of a tensor group's ranks; empty where there is no group.

    Raises:
        InputError: there are more or fewer shares than ranks.
    """
    shares = read_ratio(text, "--tp-ratio")
    if count is None or not shares:
        return shares or (1,) * (count or 0)
    if len(shares) != count:
        raise InputError(
            f"{len(shares)} shares for {count} devices that compute together",
            code="BX3505",
            at="--tp-ratio",
            help=f"give one share for each: --tensor-parallel {len(shares)}",
        )
    return shares


def read_ratio(text: str | None, at: str = "--replica-ratio") -> tuple[int, ...]:
    """Read "3:1"; nothing is an empty tuple.

    Raises:
        InputError: these are no positive numbers.
    """
    parts = [] if text is None else [part.strip() for part in text.split(":")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"expected positive numbers with colons, found {text!r}",
            code="BX3506",
            at=at,
            help="3:1 gives the first three parts of four",
        )
    return tuple(map(int, parts))


def read_axes(text: str | None) -> tuple[str, ...]:
    """Read "heads,hidden"; nothing is an empty tuple.

    Raises:
        InputError: a name is empty.
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(
            f"expected names with commas, found {text!r}",
            code="BX3507",
            at="--tp-axes",
            help="heads,hidden divides these two; leave it out, and all is divided that can be",
        )
    return tuple(names)


def _require_no_partitioner(choices: Mapping[str, Any]) -> None:
    """Refuse what only a partitioner would hear: beside --place none is asked."""
    source = click.get_current_context().get_parameter_source("partitioner")
    is_given = source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    for flag, given in (("--set", choices.get("settings")), ("--partitioner", is_given)):
        if given:
            raise InputError(
                f"--place says where all modules go, and {flag} is for a partitioner",
                code="BX3508",
                help=f"leave {flag} out, or --place; --pin holds some modules, and a partitioner "
                "places the rest",
            )


def layers_of(profile: Path | None) -> str | None:
    """Return the estimator that reads a profile of layers."""
    return None if profile is None else f"layers:{profile.resolve()}"


def _estimator(choices: Mapping[str, Any]) -> str | None:
    """Return the estimator by name, or what reads the profile.

    Raises:
        InputError: both are given.
    """
    profile, named = layers_of(choices.get("profile")), choices["estimator"]
    if profile and named:
        raise InputError(
            f"--profile is what the estimator layers reads, and --estimator says {named}",
            code="BX3580",
            help="leave one of the two out",
        )
    return profile or named


def read_assumptions(texts: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Read "model.py:31=true", several."""
    from bigbrain_fx.frontend import read_answers

    return tuple(read_answers(texts).items())


def read_names(text: str | None) -> tuple[str, ...]:
    """Read "a,b"; nothing is an empty tuple."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def read_stage(text: str) -> int:
    """Read a stage of ZeRO, one of "0" to "3"."""
    return int(text)


def read_shard_group(text: str | None) -> int | str | None:
    """Read how many replicas divide what ZeRO divides: a number, or "host".

    Raises:
        InputError: it is neither.
    """
    if text is None or text == "host":
        return text
    if not text.isdecimal() or int(text) < 2:
        raise InputError(
            f"expected a number of replicas from 2 on, or host, found {text!r}",
            code="BX3538",
            at="--shard-group",
            help="--shard-group 2",
        )
    return int(text)


_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kMBT]?)")
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_count(text: str, at: str) -> float:
    """Read "300e9", "300B" or "5000".

    Raises:
        InputError: it is no number above 0.
    """
    found = _COUNT.fullmatch(text.strip())
    count = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 0 < count < _MOST:
        raise InputError(
            f"expected a number above 0, found {text!r}",
            code="BX3536",
            at=at,
            help=f"{at} 300e9, or 300B (k, M, B and T are thousands to millions of millions)",
        )
    return count


def goals_of(choices: Mapping[str, Any]) -> Goals | None:
    """Return the limits of money and time that were given to `goal_options`; None without any."""
    from bigbrain_fx.cli.failure_options import read_duration
    from bigbrain_fx.plan import Goals

    given = {name: choices.get(name) for name in ("tokens", "max_cost", "min_throughput")}
    found = {
        name: read_count(text.removesuffix("/h"), f"--{name.replace('_', '-')}")
        for name, text in given.items()
        if text is not None
    }
    deadline, hourly = choices.get("deadline"), (given["max_cost"] or "").endswith("/h")
    goals = Goals(
        tokens=found.get("tokens"),
        max_usd=None if hourly else found.get("max_cost"),
        max_hour_usd=found.get("max_cost") if hourly else None,
        min_per_s=found.get("min_throughput"),
        deadline_s=None if deadline is None else read_duration(deadline, "--deadline"),
    )
    return None if goals == Goals() else goals


def chosen(choices: dict[str, Any]) -> Options:
    """Turn what was given to `planning_options` into Options.

    Raises:
        InputError: there is no such partitioner.
    """
    from bigbrain_fx.plan import Options
    from bigbrain_fx.planning import preset, read_settings

    place = choices.get("place")
    if place:
        _require_no_partitioner(choices)
    partitioner, own = preset(choices["partitioner"])
    fields = {each.name for each in dataclasses.fields(Options)}
    plain = {name: value for name, value in choices.items() if name in fields}
    plain["estimator"] = _estimator(choices) or own
    plain["partitioner"], plain["place"] = partitioner, str(place) if place else None
    plain["goals"] = goals_of(choices)
    settings = read_settings(partitioner, choices.get("settings", ()))
    return Options(**plain, partitioner_options=settings)
