"""Entries of a batch: found by their place, said in messages, and whether they are plain memory.

This file knows nests of dicts, tuples and lists; it splits none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .stream import BatchError, Key


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


def walk(nest: object, key: Key = ()) -> Iterator[tuple[Key, object]]:
    """Yield the leaves of a nest, each with its path."""
    if isinstance(nest, Mapping | tuple | list):
        for name, item in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
            yield from walk(item, (*key, name))
    else:
        yield key, nest


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


_NOT_PLAIN = (
    "step {step}: batch entry {name!r} is {shown}, and messages take plain tensors: let batches() "
    "give x.to_dense(), or what is nested filled up to one length, in example_batch() as well"
)
