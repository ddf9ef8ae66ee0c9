"""What goes on by itself from call to call, wherever it is kept, and what it decides later.

    run, run: places that moved ─▶ as they will be 50, 1000, 5040000000 runs later ─▶ run: alike?

A step of DQN copies its weights at every hundredth call, a warm-up ends after a thousand: the few
calls of a capture see neither. With one batch, one seed, weights and buffers put back, only what
counts moves. This file knows Python's objects and calls what it is given; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import numbers
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.tracing.plain import Numbers, alike
from bigbrain_fx.frontend.tracing.state.object_graph import Place, is_leaf, places

_ROUND = 5_040_000, 5_040_000_000  # multiples of any number after which people let things happen
_LATER = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000)
_LONGEST = 2_000  # entries that a list is given
_CALLS = 3
_LOOK_S = 1.0  # for all runs, but for the first few

Reading = tuple[Any, ...]
Look = dict[str, tuple[Place, Reading]]


@dataclass(frozen=True)
class Counter:
    """A place that moves `by` so much with each run; it was `now` when it was found."""

    place: Place
    now: Reading
    by: Reading

    def later(self, runs: int) -> None:
        """Let it be what it is so many runs after it was found."""
        self._put([now + by * runs for now, by in zip(self.now, self.by, strict=True)])

    def near(self, mark: int) -> None:
        """Let it be a few runs before a multiple of `mark`."""
        self._put(
            [by * (mark - 3) if by else now for now, by in zip(self.now, self.by, strict=True)]
        )

    def _put(self, numbers: Sequence[Any]) -> None:
        with contextlib.suppress(Exception):  # what cannot be set is left as it is
            _set(self.place, self.place.get(), numbers)


@dataclass(frozen=True)
class Decision:
    """What is kept from call to call decides: where, and after how many runs; 0: at once."""

    name: str
    runs: int


def decision(run: Callable[[], Numbers], roots: Iterable[object]) -> Decision | None:
    """Run a few times, then move what counts on; return what decides, None when nothing does.

    Places are left as the last run leaves them.

    Args:
        run: gives the same numbers each time, but for what is kept from call to call.
        roots: where counters are looked for: modules, functions, objects.
    """
    roots = tuple(roots)
    first, looks = run(), [look(roots)]
    for _ in range(_CALLS - 1):  # what begins to count is there after the first
        same = alike(first, run())
        looks.append(look(roots))
        if not same:
            return Decision(_moved(*looks[-2:]), 0)
    counters = moving(*looks)
    if not counters:
        return None
    return _decided(run, first, counters)


def _moved(before: Look, now: Look) -> str:
    """Name a place that moved; nothing where none is known to have."""
    return next((name for name in now if name in before and before[name][1] != now[name][1]), "")


Move = tuple[int, Callable[[Counter], None], int]  # runs later, what sets a counter so, runs then


def _decided(
    run: Callable[[], Numbers], first: Numbers, counters: Sequence[Counter]
) -> Decision | None:
    for move in moves():
        if not _same_after(run, first, counters, move):
            return Decision(_which(run, first, counters, move), move[0])
    return None


def moves() -> Iterator[Move]:
    """Yield how many runs later it is to be; the last ones however long all this takes."""
    is_over = budget(_LOOK_S)
    for runs in _LATER:
        if runs == _LATER[-1] or not is_over():
            yield runs, partial(Counter.later, runs=runs), 1
    for mark in _ROUND:  # some runs: one meets the mark, before it counts or after
        yield mark, partial(Counter.near, mark=mark), 4


def _same_after(
    run: Callable[[], Numbers], first: Numbers, counters: Sequence[Counter], move: Move
) -> bool:
    _, change, times = move
    for counter in counters:
        change(counter)
    try:
        return all(alike(first, run()) for _ in range(times))
    except Exception:
        return False  # it ran the first time


def _which(
    run: Callable[[], Numbers], first: Numbers, counters: Sequence[Counter], move: Move
) -> str:
    """Name the counter that decides alone; the first one where several do together."""
    for counter in counters:
        for other in counters:
            other.later(0)
        if not _same_after(run, first, [counter], move):
            return counter.place.name
    return counters[0].place.name


# --------------------------------------------------------------------------- what moves


def look(
    roots: Iterable[object], leaving: Iterable[object] = ()
) -> dict[str, tuple[Place, Reading]]:
    """Return what may count, by name, and what it reads now; `leaving` is not looked into."""
    found: Look = {}
    for place in places(roots, leaving):
        name = place.name
        while name in found:
            name += "'"  # an object's own and its class's, say
        with contextlib.suppress(Exception):  # an object of the user's, while it is looked at
            found[name] = place, reading(place.get())
    return found


def moving(*looks: Look) -> list[Counter]:
    """Return what moved from each look to the next."""
    one, two, three = looks
    found = []
    for name, (place, now) in three.items():
        if name not in one or name not in two:
            continue
        (_, before), (_, between) = one[name], two[name]
        if len(before) == len(between) == len(now) and before != between != now:
            found.append(Counter(place, now, _difference(now, between)))
    return found


def _difference(now: Reading, before: Reading) -> Reading:
    return tuple(new - old for new, old in zip(now, before, strict=True))


def reading(value: Any) -> Reading:  # noqa: ANN401  # any leaf
    """Return numbers that tell what is in a leaf."""
    if not is_leaf(value):
        return ()
    if isinstance(value, Tensor):
        return tuple(value.detach().reshape(-1).tolist())
    if isinstance(value, array):
        return tuple(value)
    if isinstance(value, list):
        return (len(value),)
    if isinstance(value, numbers.Real):
        return (value,)
    return (len(value),) if not hasattr(value, "dtype") else tuple(value.reshape(-1).tolist())


def _set(place: Place, value: Any, wanted: Sequence[Any]) -> None:  # noqa: ANN401  # any leaf
    """Let a leaf read so."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(torch.tensor(wanted, dtype=torch.float64).reshape(value.shape))
    elif isinstance(value, numbers.Real):
        place.put(type(value)(wanted[0]))  # type: ignore[call-arg]
    elif hasattr(value, "dtype"):
        value.reshape(-1)[:] = wanted
    elif isinstance(value, array):
        value[:] = array(value.typecode, wanted)
    else:
        _lengthen(value, int(wanted[0]))


def _lengthen(value: Any, wanted: int) -> None:  # noqa: ANN401  # a list or a deque
    """Let a list be so long: its last entry again and again, or without its last ones."""
    for _ in range(min(wanted - len(value), _LONGEST)):
        value.append(value[-1])
    while len(value) > max(wanted, 0):
        value.pop()
