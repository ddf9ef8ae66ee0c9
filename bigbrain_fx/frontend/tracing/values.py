"""Numbers and strings in a batch: constants of a trace. Do batches bring others that count?

    {"x": ..., "temperature": 1.0}, then {"x": ..., "temperature": 2.0}

The first batches are read, where the example has such an entry, and the model is run with theirs.
This file knows batches and runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Plain, alike
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import Key, take_apart

_BATCHES = 3
_PLAIN = (type(None), bool, int, float, str)


def require_steady(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    batches: Callable[[], Iterable[object]],
    autocast: str | None = None,
) -> None:
    """Refuse numbers and strings that change from batch to batch and that the model reads.

    Raises:
        InputError: names the entry and both values.
    """
    known = dict(plain_values(example))
    if not known:
        return
    drawn: list[object] = []
    with contextlib.suppress(Exception):  # whoever runs the bundle is told
        drawn.extend(itertools.islice(batches(), _BATCHES))
    tried: set[Key] = set()
    for key, value in itertools.chain.from_iterable(map(plain_values, drawn)):
        if key in known and value != known[key] and key not in tried:
            tried.add(key)
            if _counts(model, example, loss, autocast, key, value):
                raise _changes(key, known[key], value)


def plain_values(batch: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield key and value of each number, text, truth value or None of a batch."""
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from plain_values(value, (*key, name))
    elif isinstance(batch, tuple | list):
        for i, value in enumerate(batch):
            yield from plain_values(value, (*key, i))
    elif isinstance(batch, _PLAIN):
        yield key, batch


def _counts(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    key: Key,
    value: object,
) -> bool:
    """Whether the model computes something else with another value there."""
    how = route(model, example, loss is not None)

    def numbers(batch: object) -> tuple[Any, ...]:
        taken = take_apart(batch)
        plain = Plain(Step(model, loss, taken, how), model, autocast)
        return plain.gradients(list(taken.sized(taken.rows).values()), 0)

    try:
        return not alike(numbers(example), numbers(_with(example, key, value)))
    except Exception:  # the user's own code
        return True


def _with(batch: Any, key: Key, value: object) -> Any:  # noqa: ANN401  # a nest of any kind
    if not key:
        return value
    if isinstance(batch, Mapping):
        return {n: _with(v, key[1:], value) if n == key[0] else v for n, v in batch.items()}
    parts = [_with(v, key[1:], value) if i == key[0] else v for i, v in enumerate(batch)]
    return parts if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(parts)


def _changes(key: Key, before: object, value: object) -> InputError:
    name = ".".join(map(str, key))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return InputError(
        f"batches() changes {name} from {before!r} to {value!r}, and the model reads it: a trace "
        "would keep the first for ever",
        at="batches",
        help=f"give it as a tensor: torch.tensor({value!r})"
        if number
        else "let a tensor decide: compute both ways and choose with torch.where(flag, one, two), "
        "flag being a tensor of the batch (torch.tensor(True)); or split a model for each value",
    )
