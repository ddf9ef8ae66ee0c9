"""Name -> partitioner or estimator, ours or a third party's.

They are the entry points "bigbrain_fx.partitioners" and "bigbrain_fx.estimators". Our own tables,
`bigbrain_fx.partitioners.TABLE` and `bigbrain_fx.estimators.TABLE`, are read as well: a checkout
works before it is installed again. A checkout has both packages at its top, a wheel
in `bigbrain_fx`: each name resolves in both. This module knows no method.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from bigbrain_fx.core import Estimator, Partitioner
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning.given import Given, class_of, is_file, label, with_fields

Kind: TypeAlias = Literal["partitioner", "estimator"]

_OURS = "bigbrain-fx"
_DEFAULT_ESTIMATOR = "analytical"


def partitioner(given: Given, **options: object) -> Partitioner:
    """Make the partitioner that is registered under a name, or given.

    Args:
        given: "chain-dp" (`names("partitioner")` lists them), "mine.py:Class", or an object.
        options: its fields; `options_of` lists them.

    Raises:
        InputError: no such name, it does not take an option, or it is no partitioner.
    """
    if not isinstance(given, str):
        _require_partitioner(given, str(getattr(given, "name", type(given).__name__)))
        return with_fields(given, options)
    made = _make("partitioner", given, options)
    _require_partitioner(made, given)
    assert isinstance(made, Partitioner)
    return made


def _require_partitioner(made: object, name: str) -> None:
    if not isinstance(made, Partitioner):
        raise _not_a_plugin("partitioner", name, "partition(graph, cluster, costs)")


def require_ready(given: Given, **options: object) -> None:
    """Find out before a long capture whether a partitioner could be made, and has what it needs.

    Raises:
        InputError: as `partitioner`, or a module that it names in `needs` is not installed.
    """
    made = partitioner(given, **options)
    lacking = [
        name for name in getattr(made, "needs", ()) if importlib.util.find_spec(name) is None
    ]
    if lacking:
        raise InputError(
            f"the partitioner '{made.name}' needs {' and '.join(lacking)}, which is not installed",
            code="BX1108",
            help=f"pip install {' '.join(lacking)}, or choose another --partitioner",
        )


def estimator(name: str, **options: object) -> Estimator:
    """Make the estimator that is registered under a name.

    Args:
        name: "analytical"; `names("estimator")` lists them. Text after a colon is the file of its
            field `path`: "layers:times.json".
        options: its fields; `options_of` lists them.

    Raises:
        InputError: no such name, it does not take an option, or it is no estimator.
    """
    name, _, path = name.partition(":")
    made = _make("estimator", name, {"path": path, **options} if path else options)
    if not isinstance(made, Estimator):
        raise _not_a_plugin("estimator", name, "estimate(graph, cluster)")
    return made


def preset(name: str) -> tuple[str, str]:
    """Return the partitioner and the estimator that a name of the command line stands for.

    A partitioner's own name, or "mine.py:Class", stands for it with the analytical estimator.

    Raises:
        InputError: no such name.
    """
    table: Mapping[str, tuple[str, str]] = load("partitioner").PRESETS
    if name in table:
        return table[name]
    if is_file(name):
        class_of(name)
        return name, _DEFAULT_ESTIMATOR
    known = names("partitioner")
    if name not in known:
        raise _unknown("partitioner", name, sorted({*table, *known}))
    return name, _DEFAULT_ESTIMATOR


def names(kind: Kind | Literal["preset"] = "preset") -> tuple[str, ...]:
    """Return what may be asked for by name, sorted; presets include every partitioner."""
    if kind == "preset":
        return tuple(sorted({*load("partitioner").PRESETS, *names("partitioner")}))
    return tuple(sorted({*_table(kind), *_foreign(kind)}))


def options_of(kind: Kind, given: Given) -> frozenset[str]:
    """Return the names of the options that a partitioner or estimator takes.

    Raises:
        InputError: no such name.
    """
    return frozenset(parameters_of(kind, given))


def parameters_of(kind: Kind, given: Given) -> dict[str, inspect.Parameter]:
    """Return the options that a partitioner or estimator takes, with their defaults.

    Raises:
        InputError: no such name.
    """
    made = _class(kind, given) if isinstance(given, str) else _own_class(given)
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    found = inspect.signature(made).parameters
    return {name: each for name, each in found.items() if each.kind not in kinds}


def _own_class(given: Partitioner | type[Partitioner]) -> Callable[..., object]:
    """Return what an object can be made anew by; a plain object stays as it is."""
    made = given if inspect.isclass(given) else type(given)
    return made if inspect.isclass(given) or dataclasses.is_dataclass(made) else object


@dataclass(frozen=True)
class Plugin:
    """A name that may be asked for, and what is behind it.

    Attributes:
        kind: a preset is a partitioner with an estimator.
        package: who brings it; our own is "bigbrain-fx".
        what: the first line of its class's docstring, or why it cannot be loaded.
        options: that it takes.
    """

    name: str
    kind: Kind | Literal["preset"]
    package: str
    what: str
    options: tuple[str, ...] = ()


def registered() -> tuple[Plugin, ...]:
    """Return all presets, partitioners and estimators, ours and third parties', by kind and name.

    Raises:
        InputError: a name is registered twice.
    """
    table: Mapping[str, tuple[str, str]] = load("partitioner").PRESETS
    presets = [
        Plugin(name, "preset", _OURS, f"{method} with {judge}")
        for name, (method, judge) in sorted(table.items())
    ]
    partitioners = [_plugin("partitioner", name) for name in names("partitioner")]
    return (*presets, *partitioners, *(_plugin("estimator", name) for name in names("estimator")))


def _plugin(kind: Kind, name: str) -> Plugin:
    foreign = _foreign(kind)
    package = _package(foreign[name]) if name in foreign else _OURS
    try:
        doc = inspect.getdoc(_class(kind, name)) or ""
        taken = tuple(sorted(options_of(kind, name)))
    except InputError as error:
        return Plugin(name, kind, package, error.what)
    return Plugin(name, kind, package, doc.partition("\n")[0], taken)


@lru_cache(maxsize=2)
def load(kind: Kind) -> ModuleType:
    """Load our own table; call this before the user's folder joins `sys.path`.

    Raises:
        InputError: a file of the same name was found instead.
    """
    module = importlib.import_module(f"bigbrain_fx.{kind}s")
    package = Path(__file__).resolve().parents[1]
    home = package if (package / f"{kind}s").is_dir() else package.parent
    found = Path(module.__file__ or ".").resolve()
    if found.parent.parent != home or not hasattr(module, "TABLE"):
        raise InputError(
            f"expected bigbrain-fx's own folder '{kind}s', found another module of that name",
            code="BX1109",
            at=str(found),
            help=f"rename it, or run from another folder; ours is {home / f'{kind}s'}",
        )
    return module


def _table(kind: Kind) -> Mapping[str, Callable[..., object]]:
    table: Mapping[str, Callable[..., object]] = load(kind).TABLE
    return table


def _foreign(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages; a name that is taken is an error."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=f"bigbrain_fx.{kind}s"), key=_order):
        if _package(point) == _OURS:
            continue
        if point.name in found or point.name in _table(kind):
            raise InputError(
                f"the {kind} name '{point.name}' is registered twice",
                code="BX1110",
                notes=(f"once by the package '{_package(point)}', as {point.value}",),
                help=f"uninstall one of the packages, or rename the {kind}",
            )
        found[point.name] = point
    return found


def _order(point: EntryPoint) -> tuple[str, str, str]:
    return point.name, _package(point), point.value


def _package(point: EntryPoint) -> str:
    name = point.dist.name if point.dist is not None else ""
    return name.lower().replace("_", "-")


def _class(kind: Kind, name: str) -> Callable[..., object]:
    if name in _table(kind):
        return _table(kind)[name]
    if kind == "partitioner" and is_file(name):
        return class_of(name)
    foreign = _foreign(kind)
    if name not in foreign:
        raise _unknown(kind, name, names(kind))
    point = foreign[name]
    try:
        found: Callable[..., object] = point.load()
    except Exception as error:  # whatever a foreign package raises when it is imported
        raise InputError(
            f"the {kind} '{name}' cannot be loaded: {type(error).__name__}: {error}",
            code="BX1111",
            at=f"{point.value}, package '{_package(point)}'",
            help=_in_a_wheel(error) or "mend or uninstall the package",
        ) from error
    if not callable(found):
        raise _not_a_plugin(kind, name, "a class")
    return found


def _in_a_wheel(error: Exception) -> str | None:
    """Name the place of ours that a package imports by the name that a checkout has for it."""
    name = error.name if isinstance(error, ImportError) else None
    if name in ("partitioners", "estimators"):
        return f"a wheel has {name} as bigbrain_fx.{name}: import from there"
    return None


def _make(kind: Kind, name: str, options: Mapping[str, Any]) -> object:
    made = _class(kind, name)
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        taken = ", ".join(sorted(options_of(kind, name))) or "no option"
        raise InputError(
            f"the {kind} '{name}' does not take these options: {error}",
            code="BX1112",
            help=f"it takes {taken}",
        ) from error
    return made(**options)


def _unknown(kind: str, name: str, known: tuple[str, ...] | list[str]) -> InputError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    guess = f"did you mean {', '.join(close)}? " if close else ""
    listed = ", ".join(known)
    return InputError(
        f"there is no {kind} '{name}'", code="BX1113", help=f"{guess}choose one of {listed}"
    )


def _not_a_plugin(kind: Kind, name: str, wanted: str) -> InputError:
    return InputError(
        f"'{name}' is registered as a {kind}, but is none: it needs `name` and {wanted}",
        code="BX1114",
        help=f"see bigbrain_fx.core.{kind.capitalize()}",
    )


# ------------------------------------------------------------------------------------------------
# `--set work=9`: an option of a partitioner, read as its class declares it. It makes nothing.


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
