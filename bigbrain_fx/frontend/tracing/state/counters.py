"""Counters in attributes and closures that move with each call, and later decisions by them.

    run, run: numbers that moved ─▶ as they will be 50, 1000, 1000000 runs later ─▶ run: equal?

A step of DQN copies its weights at every hundredth call, a warm-up ends after a thousand. The calls
of a capture and the three steps of a rehearsal do not show either. This file knows Python's objects
and calls the functions that it gets; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bigbrain_fx.frontend.tracing.plain import alike
from bigbrain_fx.frontend.tracing.state.attributes import file_of, items, owners
from bigbrain_fx.frontend.translation.sources import is_own

_LATER = (50, 200, 1_000, 10_000, 1_000_000)
_ROUND = 5_040_000_000  # a multiple of most numbers after which people let things happen
_CALLS = 3
_DEEP = 4  # levels of containers and of the user's objects
_LONG = 512  # entries of a container that is looked into
_FEW = 16  # elements: a larger tensor is no counter

Reading = tuple[float, ...]
Held = tuple[Any, Any]  # what holds a number, and its key or attribute
Look = dict[str, tuple[Held, Reading]]


@dataclass(frozen=True)
class Counter:
    """A number that moves `by` so much with each run; it was `now` when it was found."""

    name: str
    now: Reading
    by: Reading

    def later(self, runs: int) -> Reading:
        """Return the value so many runs after the first look."""
        return tuple(now + by * runs for now, by in zip(self.now, self.by, strict=True))

    def near(self, mark: int) -> Reading:
        """Return the value a few runs before a multiple of `mark`."""
        return tuple(b * (mark - 3) if b else n for n, b in zip(self.now, self.by, strict=True))


@dataclass(frozen=True)
class Decision:
    """Place of a decision by state, and the number of runs before it; 0: at once."""

    name: str
    runs: int


def decision(run: Callable[[], Sequence[object]], look: Callable[[], Look]) -> Decision | None:
    """Run a few times, then move the counters on; return the one that decides, or None.

    Args:
        run: gives the same numbers each time, unless state of earlier calls decides.
        look: returns the present numbers that may be counters.
    """
    first, looks = run(), [look()]
    for _ in range(_CALLS - 1):  # what begins to count is there after the first
        same = alike(first, run())
        looks.append(look())
        if not same:
            return Decision(_moved(*looks[-2:]), 0)
    counters = moving(*looks)
    for runs, change, times in moves() if counters else ():
        put(look(), [(each, change(each)) for each in counters])
        if not _same(run, first, times):
            return Decision(_which(run, first, counters, look, change, times), runs)
    return None


Move = tuple[int, Callable[[Counter], Reading], int]  # runs later, what it is then, runs to make


def moves() -> Iterator[Move]:
    """Yield the numbers of runs to skip."""
    for runs in _LATER:
        yield runs, partial(Counter.later, runs=runs), 1
    yield _ROUND, partial(Counter.near, mark=_ROUND), 4  # one meets the mark, or the one after


def _same(run: Callable[[], Sequence[object]], first: Sequence[object], times: int) -> bool:
    try:
        return all(alike(first, run()) for _ in range(times))
    except Exception:
        return False  # it ran the first time


def _which(
    run: Callable[[], Sequence[object]],
    first: Sequence[object],
    counters: Sequence[Counter],
    look: Callable[[], Look],
    change: Callable[[Counter], Reading],
    times: int,
) -> str:
    """Name the counter that decides alone; the first one where several do together."""
    for counter in counters:
        put(look(), [(each, each.now) for each in counters])
        put(look(), [(counter, change(counter))])
        if not _same(run, first, times):
            return counter.name
    return counters[0].name


def _moved(before: Look, now: Look) -> str:
    """Name a number that moved; nothing where none is known to have."""
    return next((name for name in now if name in before and before[name][1] != now[name][1]), "")


def moving(one: Look, two: Look, three: Look) -> list[Counter]:
    """Return the numbers that moved from each look to the next."""
    found = []
    for name, (_, now) in three.items():
        before, between = (each.get(name, (None, ()))[1] for each in (one, two))
        if len(before) == len(between) == len(now) and before != between != now:
            by = tuple(new - old for new, old in zip(now, between, strict=True))
            found.append(Counter(name, now, by))
    return found


# --------------------------------------------------------------------------- where they are


def numbers_of(model: nn.Module, loss: object) -> Look:
    """Return the numbers in attributes of modules, of their classes, and of the user's files."""
    found: Look = {}
    for name, owner in owners(model, loss):
        for key, value in items(owner):
            _add(found, f"{name}.{key}".removeprefix("."), (owner, key), value, 0)
    return found


def numbers_in(holder: object, leaving: Sequence[str] = ()) -> Look:
    """Return the numbers in an object's attributes, some of them left out."""
    found: Look = {}
    for key, value in list(vars(holder).items()):
        if key not in leaving:
            _add(found, key, (holder, key), value, 0)
    return found


def _add(found: Look, name: str, held: Held, value: Any, depth: int) -> None:  # noqa: ANN401
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.device.type == "cpu"
        plain = plain and not isinstance(value, FakeTensor)
        if plain and value.numel() <= _FEW and not (value.requires_grad or value.is_complex()):
            found[name] = held, tuple(value.detach().reshape(-1).tolist())
    elif _is_number(value):
        found[name] = held, (float(value),)
    elif type(value) is tuple and len(value) <= _FEW and any(map(_is_number, value)):
        found[name] = held, tuple(float(v) for v in value if _is_number(v))
    elif depth < _DEEP:
        for key, item, shown in _parts(value):
            _add(found, name + shown, (value, key), item, depth + 1)
        for variable, cell in _closure(value):
            _add(found, f"{name}.{variable}", (cell, "cell_contents"), cell.cell_contents, depth)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _closure(value: object) -> list[tuple[str, CellType]]:
    """Return the closure of a function of the user's own, by name; numbers and lists alone."""
    if not isinstance(value, FunctionType) or not is_own(value.__code__.co_filename):
        return []
    pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    known = (int, float, Tensor, list, dict, tuple)
    return [(name, cell) for name, cell in pairs if isinstance(_contents(cell), known)]


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _parts(value: Any) -> list[tuple[Any, object, str]]:  # noqa: ANN401  # any object
    if isinstance(value, MutableMapping) and len(value) <= _LONG:
        return [(key, item, f"[{key!r}]") for key, item in list(value.items())]
    if isinstance(value, list) and len(value) <= _LONG:
        return [(key, item, f"[{key}]") for key, item in enumerate(value)]
    if not isinstance(value, type | nn.Module) and is_own(file_of(type(value))):
        return [
            (key, item, f".{key}") for key, item in list(getattr(value, "__dict__", {}).items())
        ]
    return []


def put(look: Look, wanted: Sequence[tuple[Counter, Reading]]) -> None:
    """Let numbers be others, where they are now; one that cannot be set is left as it is."""
    for counter, reading in wanted:
        if counter.name in look:
            (holder, key), _ = look[counter.name]
            with contextlib.suppress(Exception):
                _put(holder, key, reading)


def _put(holder: Any, key: Any, wanted: Reading) -> None:  # noqa: ANN401  # any object
    is_container, is_cell = isinstance(holder, MutableMapping | list), isinstance(holder, CellType)
    value = holder[key] if is_container else holder.cell_contents if is_cell else vars(holder)[key]
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(torch.tensor(wanted, dtype=torch.float64).reshape(value.shape))
    elif is_container:
        holder[key] = _counted_to(value, wanted)
    else:
        object.__setattr__(holder, key, _counted_to(value, wanted))  # frozen ones, too


def _counted_to(value: Any, wanted: Reading) -> object:  # noqa: ANN401  # a number, or a tuple
    left = iter(wanted)
    if type(value) is tuple:
        return tuple(type(v)(next(left)) if _is_number(v) else v for v in value)
    return type(value)(next(left))
