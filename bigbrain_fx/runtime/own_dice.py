"""Generators of random numbers that a file has made for itself.

    gen = torch.Generator().manual_seed(0)           # at the top of the file
    loader = DataLoader(data, shuffle=True, generator=gen)

Every process of a run draws with its own, from where the top has left it. Where several devices are
in one process, each has a state of them for itself (`data.Stream`).
"""

from __future__ import annotations

import functools
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .stream import RandomState

_MANY, _LONG = 20_000, 64  # objects, and entries of one container, that are looked at
_BULK = str, bytes, bool, int, float, complex, type(None), torch.Tensor, type, types.ModuleType


def own_dice(function: object) -> list[Any]:
    """Return the generators that a function's file holds, or the function itself, nearest first."""
    waiting, met, found = deque([function]), {id(function): function}, []
    is_bulk, is_dice, shared = _OfTypes(_BULK), _OfTypes(_kinds()), _shared()
    while waiting and len(met) < _MANY:
        value = waiting.popleft()
        if is_dice[type(value)] and not any(value is each for each in shared):
            found.append(value)
            continue
        for held in _held(value):
            if id(held) not in met and not is_bulk[type(held)]:
                met[id(held)] = held
                waiting.append(held)
    return found


class _OfTypes(dict[type, bool]):
    """Whether values of a type are of some kinds; asked once a type, not for each value."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.kinds = kinds

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = issubclass(kind, self.kinds)
        return found


def states_of(dice: Sequence[Any]) -> list[Any]:
    """Return where generators are."""
    return [_state(each) for each in dice]


def set_states(dice: Sequence[Any], states: Sequence[Any]) -> None:
    """Let generators go on from somewhere else."""
    for each, state in zip(dice, states, strict=True):
        if isinstance(each, random.Random):
            each.setstate(state)
        elif hasattr(each, "bit_generator"):
            each.bit_generator.state = state
        else:  # torch's, and NumPy's older ones
            each.set_state(state)


def _state(dice: Any) -> Any:  # noqa: ANN401  # torch's, Python's or NumPy's
    if isinstance(dice, random.Random):
        return dice.getstate()
    if hasattr(dice, "bit_generator"):
        return dice.bit_generator.state
    return dice.get_state()


def _kinds() -> tuple[type, ...]:
    """Return the types that draw random numbers."""
    numpy_random = sys.modules.get("numpy.random")  # nothing here needs it: a user may
    more = (numpy_random.Generator, numpy_random.RandomState) if numpy_random else ()
    return torch.Generator, random.Random, *more


def _shared() -> tuple[object, ...]:
    """Return the generators that all files share."""
    numpy_random = sys.modules.get("numpy.random")
    more = (numpy_random.mtrand._rand,) if numpy_random else ()
    return torch.default_generator, vars(random)["_inst"], *more


def _held(value: Any) -> Iterable[object]:  # noqa: ANN401  # any object
    """Return what an object leads to."""
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        named = list(value.__globals__.values()) if _is_users(value) else []
        return *cells, value.__defaults__, value.__kwdefaults__, *named, value.__dict__
    if isinstance(value, types.MethodType | functools.partial):
        return [getattr(value, name, None) for name in ("__func__", "__self__", "func", "args")]
    if isinstance(value, Mapping):
        return [value[key] for key in list(value)[:_LONG]]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)[:_LONG]
    return (getattr(value, "__dict__", None),)


def _is_users(function: types.FunctionType) -> bool:
    """Whether a function stands in a file of the user's, and not in a library."""
    name = function.__code__.co_filename
    return "site-packages" not in name and not name.startswith(os.path.dirname(os.__file__))


class OwnRandomState(RandomState):
    """The stream's random state, with that of generators that the user's file has for itself."""

    def __init__(self, seed: int, more: Sequence[Any] = ()) -> None:
        super().__init__(seed)
        self.more, self.own_more = more, states_of(more)

    def __enter__(self) -> None:
        super().__enter__()
        self.outer_more = states_of(self.more)
        set_states(self.more, self.own_more)

    def __exit__(self, *_: object) -> None:
        self.own_more = states_of(self.more)
        set_states(self.more, self.outer_more)
        super().__exit__()


def has_generators(function: object) -> bool:
    """Whether a function leads to generators of a file's own."""
    return bool(own_dice(function))


@contextmanager
def left_alone(function: object) -> Iterator[None]:
    """Let what is drawn within move none of a file's own generators."""
    dice = own_dice(function)
    states = states_of(dice)
    try:
        yield
    finally:
        set_states(dice, states)
