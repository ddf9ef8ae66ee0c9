"""Entries of a batch that hold offsets into another one, its rows laid end to end: `cu_seqlens`.

x [2, 4]    offsets 0 3 6 8      row 0: 0 3 4 4     row 1: 0 0 2 4
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbrain_fx.errors import InputError


def cut_offsets(offsets: Tensor, start: int, end: int) -> Tensor:
    """Return the offsets of the positions from `start` to `end`, counted from `start`."""
    return offsets.clamp(start, end) - start


def row_positions(own: Tensor, others: Sequence[Tensor], rows: int) -> int:
    """Return how many positions a row has that offsets count; 0 where they are no offsets.

    Offsets are whole numbers that rise from 0 to the number of positions of another entry.
    """
    if not _rises_from_zero(own):
        return 0
    end = int(own[-1])
    shapes = [t.shape for t in others if t.dim() > 1 and t.shape[0] == rows]
    is_end = end > rows and any(end == shape[0] * shape[1] for shape in shapes)
    return end // rows if is_end else 0


def may_be_offsets(own: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether whole numbers rise from 0 within the length of a flat entry: EmbeddingBag's."""
    if not _rises_from_zero(own):
        return False
    flat = [t for t in others if t.dim() == 1 and len(t) != len(own)]
    return any(len(own) - 1 <= int(own[-1]) <= len(t) for t in flat)


def _rises_from_zero(own: Tensor) -> bool:
    if own.dim() != 1 or own.dtype not in (torch.int32, torch.int64) or own.is_meta:
        return False
    return len(own) > 1 and int(own[0]) == 0 and not bool((own[1:] < own[:-1]).any())


def no_offsets(name: str, tensor: Tensor, into: str, shapes: Sequence[object]) -> InputError:
    """Refuse offsets that a model file declares and that do not end where their entry does."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputError(
        f"batch_dims says that {name!r} holds offsets into {into!r}, of shape "
        f"{', '.join(map(str, shapes))}: expected whole numbers that rise from 0 to the number of "
        f"its positions, found {dtype}{list(tensor.shape)}",
        code="BX2194",
        at="example_batch",
        help="end them with the number of positions of all rows, as cu_seqlens do; a batch with "
        "fewer documents is filled up with that number",
    )
