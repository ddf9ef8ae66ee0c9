"""Numbers and strings in a batch: constants of a trace. Do batches bring others that count?

    {"x": ..., "temperature": 1.0}, then {"x": ..., "temperature": 2.0}

The first batches are read, and where one has something else beside its tensors (a number, a longer
list, a mask where the example has None), the model is run with that.
This file knows batches and runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.frontend.translation.batch_dims import Key

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
    drawn: list[object] = []
    with contextlib.suppress(Exception):  # whoever runs the bundle is told
        drawn.extend(itertools.islice(batches(), _BATCHES))
    for batch in drawn:
        for key, before, value in unlike(example, batch):
            if _counts(model, example, loss, autocast, key, value):
                raise _changes(key, before, value)


def nodes(batch: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield every part of a batch under its key, containers before what they hold."""
    yield key, batch
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from nodes(value, (*key, name))
    elif isinstance(batch, tuple | list):
        for i, value in enumerate(batch):
            yield from nodes(value, (*key, i))


def plain_values(batch: object) -> Iterator[tuple[Key, object]]:
    """Yield key and value of each number, text, truth value or None of a batch."""
    return ((key, value) for key, value in nodes(batch) if isinstance(value, _PLAIN))


def objects(batch: object) -> Iterator[tuple[Key, object]]:
    """Yield what is neither a tensor nor plain nor a container: an array, an enum, the user's."""
    known = Tensor, Mapping, tuple, list, *_PLAIN
    return ((key, value) for key, value in nodes(batch) if not isinstance(value, known))


def lengths(batch: object) -> Iterator[tuple[Key, int]]:
    """Yield the lengths of lists and tuples within a batch."""
    for key, value in nodes(batch):
        if key and isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            yield key, len(value)


def orders(batch: object) -> Iterator[tuple[Key, str]]:
    """Yield the names of each dict of a batch that has several, in their order."""
    for key, value in nodes(batch):
        if isinstance(value, Mapping) and len(value) > 1:
            yield key, ", ".join(map(str, value))


def unlike(example: object, batch: object, key: Key = ()) -> Iterator[tuple[Key, object, object]]:
    """Yield what a batch has otherwise than the example, beside the numbers of its tensors."""
    if isinstance(example, Mapping) and isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from unlike(example.get(name, _NOTHING), value, (*key, name))
    elif isinstance(example, tuple | list) and isinstance(batch, tuple | list):
        if key and len(example) != len(batch):
            yield key, example, batch
        for i, (one, other) in enumerate(zip(example, batch, strict=False)):
            yield from unlike(one, other, (*key, i))
    elif not (isinstance(example, Tensor) and isinstance(batch, Tensor)):
        plain = isinstance(example, _PLAIN) and isinstance(batch, _PLAIN)
        if not (plain and (example == batch or example != example)):  # NaN
            yield key, example, batch


_NOTHING = object()


def numbers_of(batch: object, model: nn.Module, loss: Loss | None, autocast: str | None) -> Numbers:
    """Run the model on a batch; return its results and their gradients."""
    taken, how = take_apart(batch), route(model, batch, loss is not None)
    plain = Plain(Step(model, loss, taken, how), model, autocast)
    return plain.gradients(list(taken.sized(taken.rows).values()), 0)


def _counts(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    key: Key,
    value: object,
) -> bool:
    """Whether the model computes something else with another value there."""
    run = partial(numbers_of, model=model, loss=loss, autocast=autocast)
    try:
        return not alike(run(example), run(with_value(example, key, value)))
    except InputError:  # an entry more, which forward does not take
        return False
    except Exception:  # the user's own code
        return True


def with_value(batch: Any, key: Key, value: object) -> Any:  # noqa: ANN401  # a nest of any kind
    """Return a batch with another value at a key."""
    if not key:
        return value
    if isinstance(batch, Mapping):
        return {**batch, key[0]: with_value(batch.get(key[0]), key[1:], value)}
    parts = [with_value(v, key[1:], value) if i == key[0] else v for i, v in enumerate(batch)]
    return parts if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(parts)


def _shown(value: object) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple | Mapping):
        return f"{len(value)} entries"
    return f"an object of {type(value).__name__}"


def _changes(key: Key, before: object, value: object) -> InputError:
    name = ".".join(map(str, key))
    return InputError(
        f"batches() changes {name} from {_shown(before)} to {_shown(value)}, and the model "
        "reads it: a trace would keep the first for ever",
        code="BX2164",
        at="batches",
        help=_remedy(before, value),
    )


def _remedy(before: object, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"give it as a tensor: torch.tensor({value!r})"
    if type(before).__name__ == "ndarray" or type(value).__name__ == "ndarray":
        return "give it as a tensor, in example_batch() as well: torch.from_numpy(array)"
    if not isinstance(before, _PLAIN) or not isinstance(value, _PLAIN):
        return (
            "give every batch the same entries: a mask of ones, torch.ones(rows, n), where there "
            "is none, and one tensor with a dimension for what a list has more or less of, filled "
            "up and with a mask"
        )
    return (
        "let a tensor decide: compute both ways and choose with torch.where(flag, one, two), "
        "flag being a tensor of the batch (torch.tensor(True)); or split a model for each value"
    )
