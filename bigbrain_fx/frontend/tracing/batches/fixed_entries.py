"""Entries of a batch that must stay as in the example, and those that forward writes into.

    {"x": ..., "phase": "warm", "views": [a, b], "mask": None} ─▶ phase is "warm", 2 views, no mask

Later batches are read by a run alone, which stops where such an entry is another one. The model is
run with other values to see what it goes by. This file knows batches and runs steps; it knows no
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.batches.constants import (
    lengths,
    numbers_of,
    objects,
    orders,
    plain_values,
    with_value,
)
from bigbrain_fx.frontend.tracing.plain import Numbers, alike
from bigbrain_fx.frontend.tracing.state.hidden_state import is_costly
from bigbrain_fx.frontend.tracing.step import Loss, Route, route
from bigbrain_fx.frontend.translation.batch import Batch, take_apart
from bigbrain_fx.frontend.translation.batch_dims import Key

PlainValue = None | bool | int | float | str
Fixed = tuple[Key, PlainValue]
_LONG = 500  # characters
_NO_VALUES = (" at 0x", "tensor(", "array(")  # what repr says of what it does not say whole


def fixed_entries(
    model: nn.Module, example: object, loss: Loss | None, autocast: str | None
) -> tuple[Fixed, ...]:
    """Return the entries that are no tensors and that count, with their values.

    Of a list it is its length; of a dict, where it counts, the order of its names.

    Of an object (an enum, a slice) it is what repr says. Of a model that is costly to run these are
    all that reach forward, texts left out.

    Raises:
        InputError: an object counts, and nothing that repr says tells it from another.
    """
    plain = [*_plain(example), *lengths(example), *orders(example)]
    found: list[tuple[Key, object]] = [*plain, *objects(example)]
    if not found:
        return ()
    taken, how = take_apart(example), route(model, example, loss is not None)
    if is_costly(model, list(taken.sized(taken.rows).values())):
        reach = [(k, v) for k, v in found if _reaches(how, k) and not isinstance(v, str)]
        return tuple((k, _kept(k, v)) for k, v in reach)
    run = partial(numbers_of, model=model, loss=loss, autocast=autocast)
    try:
        trial = _Trial(example, run, run(example))
    except Exception:
        return ()  # `trace` says what is wrong with the example
    return tuple((key, _kept(key, value)) for key, value in found if trial.goes_by(key, value))


def _kept(key: Key, value: object) -> PlainValue:
    """Return what a run compares: a plain value itself, of an object what repr says of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    said = repr(value)
    if len(said) < _LONG and not any(part in said for part in _NO_VALUES):
        return said
    name = ".".join(map(str, key))
    raise InputError(
        f"the model goes by {name} of the batch, an object of {type(value).__name__}: a trace "
        "keeps what it is in the example, and a run cannot tell whether it stays so",
        code="BX2109",
        at="example_batch",
        help="give as tensors what is read of it (torch.from_numpy(array), torch.tensor(number)); "
        "or as a number or a text, which must be the same in all batches",
    )


def _plain(example: object) -> Iterator[Fixed]:
    for key, value in plain_values(example):
        if value is None or isinstance(value, bool | int | float | str):
            yield key, value


def _reaches(how: Route, key: Key) -> bool:
    first = key[0] if key else None
    placed = isinstance(first, int) and first < how.positions
    return how.whole or placed or first in how.keys


@dataclass(frozen=True)
class _Trial:
    """The example, what runs a batch, and what it gives for the example."""

    example: object
    run: Callable[[object], Numbers]
    first: Numbers

    def goes_by(self, key: Key, value: object) -> bool:
        """Whether the model computes something else, or fails, with another value there."""
        asked: list[str] = []
        try:
            for other in self._others(key, value, asked):
                if not alike(self.first, self.run(with_value(self.example, key, other))):
                    return True
        except Exception:  # the user's own code: it fails with a longer list in plain PyTorch, too
            return not isinstance(_at(self.example, key), list | tuple)
        return bool(asked)

    def _others(self, key: Key, value: object, asked: list[str]) -> Iterator[object]:
        """Yield values to try; a text notes in `asked` when it is compared."""
        held = _at(self.example, key)
        if isinstance(held, list | tuple):
            yield [*held, held[-1] if held else 0.0]
        elif isinstance(held, Mapping):
            yield dict(reversed([*held.items()]))
        elif isinstance(value, bool):
            yield not value
        elif isinstance(value, int | float):
            yield from (value + type(value)(more) for more in (1, 10, 1_000, 1_000_000))
            yield type(value)(0)
            yield -value - 1
        elif isinstance(value, str):
            yield _noting(asked)(value)
        else:
            yield object()


def _at(batch: object, key: Key) -> object:
    for part in key:
        batch = batch[part]  # type: ignore[index]  # a key of this very batch
    return batch


def _noting(asked: list[str]) -> type[str]:
    """Return texts that note what they are asked, but for how they are shown."""

    class Noting(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            asked.append("==")
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            asked.append("!=")
            return str.__ne__(self, other)

        def __hash__(self) -> int:
            asked.append("hash")
            return str.__hash__(self)

        def __contains__(self, part: object) -> bool:
            asked.append("in")
            return isinstance(part, str) and str.__contains__(self, part)

        def __getattribute__(self, name: str) -> object:
            if not name.startswith("__"):
                asked.append(name)
            return str.__getattribute__(self, name)

    return Noting


def on_written(names: Sequence[str], batch: Batch) -> tuple[str, ...]:
    """Say what becomes of what forward or loss write into the batch.

    Raises:
        InputError: it is another entry's memory, too, which a device would not see written.
    """
    if not names:
        return ()
    shared = batch.overlapping()
    for name in names:
        if name in shared:
            raise InputError(
                f"forward or loss writes into {name} of the batch in place, and {shared[name]} is "
                "the same memory: in a bundle each entry has its own, and is not written with it",
                code="BX2165",
                at="example_batch",
                help=f"compute with a copy: x = x * 2 for x.mul_(2); or give {shared[name]} as a "
                "copy, if it is to stay as it was: y = x.clone()",
            )
    return (
        f"forward or loss writes into the batch in place ({', '.join(names[:3])}): each step "
        "begins with what batches() gave, also where it gives the same memory again; a plain loop "
        "would go on from what was written there (x = x * 2 for x.mul_(2) leaves no doubt)",
    )
