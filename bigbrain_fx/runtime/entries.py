"""What every batch must have as the first one has: its entries, and what the model goes by.

    {"x": ..., "t": {"y": ...}}, then {"x": ..., "t": {"y": ..., "w": ...}}: t.w is new

A trace has looked for them once. This file knows nests of dicts, tuples and lists; it splits none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .stream import BatchError, Key


def names_of(batch: object) -> Any:  # noqa: ANN401  # a nest of any kind
    """Return the nest of a batch without what it holds: keys, positions, and of arrays the kind."""
    if isinstance(batch, Mapping):
        return {key: names_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [names_of(value) for value in batch]
    return _kind(batch)


def _kind(value: object) -> str | None:
    """Return whose array a value is: torch's, or another's (of NumPy, of pandas)."""
    if isinstance(value, Tensor):
        return "a tensor"
    return "an array" if hasattr(value, "__array__") else None


def require_known(first: object, batch: object, step: int) -> None:
    """Refuse entries that the first batch has not, or not so: forward or loss may look for them.

    Args:
        first: its names.
        batch: one of later.
        step: that takes it.

    Raises:
        BatchError: there are such.
    """
    new = sorted(_shown(key) for key in _new(first, batch, ()))
    if new:
        raise BatchError(_NEW_ENTRY.format(step=step, names=", ".join(new)), code="BX5037")
    for key, before, now in _turned(first, batch, ()):
        raise BatchError(
            _TURNED.format(step=step, name=_shown(key), before=before, now=now), code="BX5038"
        )


def _new(first: Any, batch: object, key: tuple[object, ...]) -> Iterator[tuple[object, ...]]:  # noqa: ANN401
    """Yield what leads to new entries; how long a list within a batch is, is looked at apart."""
    if isinstance(first, dict) and isinstance(batch, Mapping):
        for name, value in batch.items():
            known = name in first
            yield from _new(first[name], value, (*key, name)) if known else ((*key, name),)
    elif isinstance(first, list) and isinstance(batch, tuple | list):
        yield from () if key else ((i,) for i in range(len(first), len(batch)))
        for i, (one, other) in enumerate(zip(first, batch, strict=False)):
            yield from _new(one, other, (*key, i))


def _turned(
    first: Any,  # noqa: ANN401  # a nest of any kind
    batch: object,
    key: tuple[object, ...],
) -> Iterator[tuple[tuple[object, ...], str, str]]:
    """Yield what was a tensor and is another array now, or the other way round.

    Of entries that the trace has not read nothing else is known: `if isinstance(w, np.ndarray)`.
    """
    if isinstance(first, dict) and isinstance(batch, Mapping):
        for name in first.keys() & batch.keys():
            yield from _turned(first[name], batch[name], (*key, name))
    elif isinstance(first, list) and isinstance(batch, tuple | list):
        for i, (one, other) in enumerate(zip(first, batch, strict=False)):
            yield from _turned(one, other, (*key, i))
    elif isinstance(first, str) and (now := _kind(batch)) not in (None, first):
        yield key, first, str(now)


def _shown(key: tuple[object, ...]) -> str:
    return repr(key[0]) if len(key) == 1 else repr(".".join(map(str, key)))


def pick(batch: object, key: Key, step: int) -> object:
    """Return what is at a place of a batch.

    Raises:
        BatchError: nothing is.
    """
    found: Any = batch  # dicts, tuples and lists, nested as the user likes
    for part in key:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, key))
            raise BatchError(
                f"step {step}: the batch has no entry {where!r}", code="BX5043"
            ) from error
    return found


def require_plain(inputs: Mapping[str, Key], batch: object, step: int) -> None:
    """Refuse tensors that are no plain memory: sparse, nested, or without numbers.

    Args:
        inputs: what leads to the model's inputs.
        batch: the batch of a step.
        step: that takes it.

    Raises:
        BatchError: there is one.
    """
    for name, key in inputs.items():
        found: object = None
        with suppress(BatchError):  # there is none: said where it is read
            found = pick(batch, key, step)
        if isinstance(found, Tensor) and not is_plain(found):
            raise BatchError(
                _NOT_PLAIN.format(step=step, name=name, shown=said(found)), code="BX5044"
            )


def is_number(value: object) -> bool:
    """Whether a value is a Python number, and neither true nor false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_scalar(value: Any, dtype: str) -> Any:  # noqa: ANN401  # of a batch: anything
    """Return a Python number as a tensor of a type; what such a type cannot hold, as it is."""
    kind: torch.dtype = getattr(torch, dtype)
    fits = is_number(value) and (kind.is_floating_point or isinstance(value, int))
    return torch.tensor(value, dtype=kind) if fits else value


def is_plain(value: Tensor) -> bool:
    """Whether a tensor's numbers lie in memory, at strides."""
    return value.layout == torch.strided and not (value.is_nested or value.is_meta)


def said(value: object) -> str:
    """Say what an entry is: its element type and shape, or its class."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    if value.is_nested:  # it has no shape
        return "a nested tensor"
    shown = spelled(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if value.layout != torch.strided:
        return f"{str(value.layout).removeprefix('torch.')} {shown}"
    return f"{shown} without numbers (meta)" if value.is_meta else shown


def spelled(dtype: str, shape: tuple[int, ...]) -> str:
    """Spell element type and shape as messages do: float32[8, 6]."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


_NEW_ENTRY = (
    "step {step}: the batch has the entry {names}, which the first batch has not, and the model "
    "was split without: give every batch the same entries, and example_batch(), too (a mask or a "
    "weight of ones where there is none), or leave it out"
)
_NOT_PLAIN = (
    "step {step}: batch entry {name!r} is {shown}, and messages take plain tensors: let batches() "
    "give x.to_dense(), or what is nested filled up to one length, in example_batch() as well"
)
_TURNED = (
    "step {step}: batch entry {name} is {now}, and was {before} in the first batch: give it as a "
    "tensor in every batch, with torch.as_tensor, and in example_batch(), too"
)
