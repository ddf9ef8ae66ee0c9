"""What every batch must have as the first one has: its entries, and what the model goes by.

    {"x": ..., "t": {"y": ...}}, then {"x": ..., "t": {"y": ..., "w": ...}}: t.w is new

A trace has looked for them once. This file knows nests of dicts, tuples and lists; it splits none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .stream import BatchError, Key

_MOST = 2**24  # bytes: of larger entries of one memory it is not looked at which places they share


class AssumptionError(BatchError):
    """Report data for which the model would have taken another path than the one written here."""


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


def require_fixed(fixed: Sequence[tuple[Key, object]], batch: object, step: int) -> None:
    """Refuse a batch in which something that the model goes by is otherwise than in the example.

    Args:
        fixed: what leads there, and what is there: a plain value, how long a list is, what repr
            says of an object, the names of a dict in their order, how a tensor is laid out.
        batch: the batch of a step.
        step: that takes it.

    Raises:
        BatchError: it is.
    """
    for key, want in fixed:
        found = pick(batch, key, step)
        if isinstance(found, Mapping):
            _require_order(found, want, key, step)
            continue
        if isinstance(found, Tensor) and str(want).startswith(_LAID):
            _require_laid(found, str(want), key, step)
            continue
        if isinstance(found, Tensor) and want == APART:
            _require_apart(found, batch, key, step)
            continue
        found = len(found) if isinstance(found, list | tuple) else found
        if not (found is None or isinstance(found, bool | int | float | str | Tensor)):
            found = repr(found)  # of an object
        if isinstance(found, Tensor) or not (found == want or found != found):  # NaN
            name, shown = ".".join(map(str, key)), said(found)
            shown = shown if isinstance(found, Tensor) else repr(found)[:80]
            raise BatchError(
                _OTHERWISE.format(step=step, name=name, shown=shown, want=want), code="BX5039"
            )


def _require_order(found: Mapping[object, object], want: object, key: Key, step: int) -> None:
    order = ", ".join(map(str, found))
    if order != want:
        name = f"entries of {'.'.join(map(str, key))!r}" if key else "batch's entries"
        raise BatchError(_ORDER.format(step=step, name=name, order=order, want=want), code="BX5040")


def _require_laid(found: Tensor, want: str, key: Key, step: int) -> None:
    if laid(found) != want:
        name = ".".join(map(str, key))
        raise BatchError(
            _LAYOUT.format(step=step, name=name, found=laid(found), want=want), code="BX5041"
        )


def _require_apart(found: Tensor, batch: object, key: Key, step: int) -> None:
    for place, other in _tensors(batch, ()):
        if place != key and overlap(found, other):
            name, shared = (".".join(map(str, each)) for each in (key, place))
            raise BatchError(_SHARED.format(step=step, name=name, shared=shared), code="BX5042")


def _tensors(batch: object, key: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    if isinstance(batch, Tensor):
        yield key, batch
    elif isinstance(batch, Mapping | tuple | list):
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for name, value in pairs:
            yield from _tensors(value, (*key, name))


def laid(tensor: Tensor) -> str:
    """Say how a tensor lies in memory, whatever its rows: dimensions from slow to fast, and gaps.

    Row by row they are in their order, also where there is one element along some.
    """
    strides: tuple[int, ...] = tensor.stride()
    order = [*range(tensor.dim())]
    if not tensor.is_contiguous():
        order.sort(key=lambda dim: (-strides[dim], dim))
    room = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    gaps = ", with gaps" if tensor.numel() and room != tensor.numel() else ""
    gradient = ", asking for a gradient" if tensor.requires_grad else ""
    return f"{_LAID}{', '.join(map(str, order))}{gaps}{gradient}"


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of two tensors is the same memory."""
    home = one.untyped_storage()
    if not home.nbytes() or home.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.dtype != other.dtype or home.nbytes() > _MOST:
        return True  # for all that is known
    places = torch.arange(home.nbytes() // one.element_size())
    inner = [places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return bool(torch.isin(inner[0].reshape(-1), inner[1].reshape(-1)).any())


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


APART = "in memory of its own"  # what is to be said of an entry that forward writes into
_SHARED = (
    "step {step}: forward or loss writes into {name} of the batch in place, and {shared} is the "
    "same memory here: in a bundle each entry has its own, and is not written with it: compute "
    "with a copy (x = x * 2 for x.mul_(2)), or let batches() give {shared} as a copy "
    "(y = x.clone())"
)
_LAID = "laid out by dimensions "
_LAYOUT = (
    "step {step}: batch entry {name!r} is {found}, and the model, which asks a tensor how it lies "
    "in memory or whether it wants a gradient, was split for one {want}: let batches() give "
    "x.detach().contiguous(), in example_batch() as well, or let a tensor of the batch say what is "
    "to be done"
)
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
_ORDER = (
    "step {step}: the {name} come in the order {order}, and the model, which takes them one after "
    "another, was split for {want}: give them in one order, in example_batch() as well"
)
_OTHERWISE = (
    "step {step}: batch entry {name!r} is {shown}, and the model was split for {want!r}, which it "
    "goes by: give what changes as a tensor that the model computes with (torch.where chooses by "
    "one), in example_batch() as well, or split a model for each value"
)
