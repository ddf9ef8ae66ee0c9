"""How far an iterator has come, and how to let it go on: itertools', Python's own, a generator.

    chain(repeat(0.5, 5000), [0.1]) ─▶ what it would be built again from ─▶ 5000, 4999, 4998, ...

No attribute tells it, but `__reduce__` does: with what copies are made, the place in a list among
it. An iterator goes on and does not come back. This file knows Python's iterators and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import types
import warnings
from collections.abc import Iterator
from typing import Any, TypeGuard

from bigbrain_fx.frontend.tracing.budget import budget

_FURTHEST, _LOOK_S = 1_000_000, 0.1  # how often one is asked, and for how long
_DEEP = 8  # iterators of iterators


def is_iterator(value: object) -> TypeGuard[Iterator[Any]]:
    """Whether a value is an iterator without attributes to look into."""
    kind = type(value)
    plain = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return isinstance(value, types.GeneratorType) or plain


def come(value: Iterator[Any]) -> float:
    """Return a number that changes as an iterator goes on, of all that says where it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # itertools' copies, from 3.12 on
        return sum(place * number for place, number in enumerate(_numbers(value, _DEEP), 1))


def go_on(value: Iterator[Any], steps: float) -> None:
    """Ask for so many of what is next; for fewer where that takes long."""
    is_over = budget(_LOOK_S)
    for _ in range(int(min(max(steps, 0), _FURTHEST))):
        if is_over():
            return
        next(value)


def _numbers(value: Iterator[Any], depth: int) -> Iterator[float]:
    if hasattr(value, "__length_hint__"):  # of a list's, say: less and less
        with contextlib.suppress(TypeError):  # repeat(x) has no end
            yield -value.__length_hint__()
        return
    for part in _parts(value):
        if type(part) in (int, float):
            yield part
        elif is_iterator(part) and depth:
            yield from _numbers(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:  # noqa: ANN401  # an iterator
    """Yield what an iterator would be built again from, tuples of it taken apart."""
    if isinstance(value, types.GeneratorType):
        yield from gc.get_referents(value)  # what it goes through with `for`, too
        return
    for part in value.__reduce__()[1:]:  # what its kind is called with, its state
        yield from part if isinstance(part, tuple) else (part,)
