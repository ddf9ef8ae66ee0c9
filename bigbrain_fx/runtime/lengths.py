"""Lengths of batches: how far each is filled up, and which were planned for.

This file knows shapes and sentences; `splitting` knows the batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from .stream import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from .splitting import Splitting


def bucketed(
    planned: Sequence[int], free: Collection[int], own: Sequence[int], buckets: Sequence[int]
) -> Sequence[int]:
    """Return the shape to which a tensor is filled up.

    Args:
        planned: shape of the longest.
        free: dimensions in which it may be shorter.
        own: its shape.
        buckets: lengths to which it is filled up; none: it keeps its own.
    """
    found = [*planned]
    for dim in free:
        fits = [length for length in buckets if length >= own[dim]]
        found[dim] = min(fits, default=own[dim])
    return found


def own_shape(
    name: str,
    value: Tensor,
    planned: tuple[int, ...],
    splitting: Splitting,
    step: int,
    found: dict[str, tuple[str, int]],
) -> tuple[int, ...]:
    """Return the planned shape with the lengths that an entry has, if it may have them.

    Args:
        name: of the entry.
        value: what the batch has there, its rows first.
        planned: its shape in the longest batch.
        splitting: what the model file says of lengths.
        step: of the batch.
        found: free length -> an entry of this batch that has it, and what it is there.

    Raises:
        BatchError: one is longer than planned, or none of `buckets`, or another entry's is another
            one.
    """
    shape = [*planned]
    if value.dim() != len(planned):
        return planned
    for dim, length in splitting.lengths[name]:
        _require_length(name, dim, value.shape[dim], planned[dim], splitting, step)
        first, own = found.setdefault(length, (name, value.shape[dim]))
        if own != value.shape[dim]:
            raise BatchError(
                f"step {step}: batch entry {name!r} has the length {value.shape[dim]}, and "
                f"{first!r} {own}: they were equal in the batches that split has seen: give them "
                "equal lengths in batches(), or split again with a first batch whose lengths "
                "differ so",
                code="BX5208",
            )
        shape[dim] = own
    return tuple(shape)


def _require_length(
    name: str, dim: int, own: int, planned: int, splitting: Splitting, step: int
) -> None:
    """Refuse a length that no trace holds for, or that messages have no room for.

    Raises:
        BatchError: it is longer than planned, one, or none of the buckets.
    """
    about = f"step {step}: batch entry {name!r} has the length {own} in dimension {dim}"
    buckets = tuple(splitting.buckets)
    if own > planned:
        raise BatchError(
            f"{about}, and the longest planned for is {planned}: say so in the model file, "
            f"lengths = {(*buckets, own)}, and split again; or cut it in batches()"
            if buckets
            else f"{about}, and the longest of the batches that split has seen is {planned}: let "
            f"example_batch() have the greatest length of all, such as {own}, and split again; or "
            "cut it in batches()",
            code="BX5209",
        )
    if own < 2:
        raise BatchError(
            f"{about}, and a trace of free lengths holds from 2 on: leave such batches out in "
            "batches(), or fill them up",
            code="BX5210",
        )
    if buckets and own not in buckets:
        raise BatchError(
            f"{about}, which is none of lengths = {buckets}: say what fills it up in the model "
            f"file, pad = {{{name!r}: 0}}, or fill it up in batches(), and split again",
            code="BX5211",
        )
