"""Batch dimensions of the entries of a batch, as a model file gives them.

The module knows tensors by key, not nests or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigbrain_fx.errors import InputError

Key = tuple[str | int, ...]
BatchDims = Mapping[str | int, int | str | None]
"""An entry of a batch -> its dimension that is the batch; None; or "ragged:x", offsets into x."""
RAGGED = "ragged:"


def dims_of(found: Sequence[tuple[Key, Tensor]], dims: BatchDims) -> dict[Key, int | None]:
    """Return the batch's dimension of each tensor for which the user named it.

    Raises:
        InputError: an entry is not there, or has no such dimension, or another number of rows.
    """
    said: dict[Key, int | None] = {}
    for name, dim in dims.items():
        for key, tensor in named(found, name, "batch_dims"):
            if isinstance(dim, str):
                continue
            if dim is not None and not dim < tensor.dim():
                raise InputError(
                    f"batch_dims says dimension {dim} of {name!r}, which has the shape "
                    f"{list(tensor.shape)}",
                    code="BX2170",
                    help="count from 0; None where every micro-batch gets all of it",
                )
            said[key] = dim
    rows = {t.shape[d] for key, t in found if (d := said.get(key)) is not None}
    if len(rows) > 1:
        raise InputError(
            f"batch_dims gives the example batch {', '.join(map(str, sorted(rows)))} rows",
            code="BX2171",
            help="name the dimension of each entry that is the batch: its length is that of all",
        )
    return said


def offsets_of(found: Sequence[tuple[Key, Tensor]], dims: BatchDims, rows: int) -> dict[Key, int]:
    """Return the positions of a row of each entry that holds offsets into rows laid end to end.

    Offsets are integers that begin with 0, rise, and end at the length of another entry's leading
    dimensions. The user may name that entry, or declare by any other word that they are none.

    Raises:
        InputError: offsets that the user has declared do not end at that length.
    """
    declared = {
        key: dim for name, dim in dims.items() for key, _ in named(found, name, "batch_dims")
    }
    offsets: dict[Key, int] = {}
    for key, tensor in found:
        said = declared.get(key, RAGGED)
        if isinstance(said, str):
            into = said.removeprefix(RAGGED)
            others = named(found, into, "batch_dims") if into else found
            per_row = row_positions(tensor, [t for k, t in others if k != key], rows)
            if into and not per_row:
                shapes = [list(other.shape) for _, other in others]
                raise no_offsets(".".join(map(str, key)), tensor, into, shapes)
            offsets |= {key: per_row} if per_row else {}
    return offsets


def named(
    found: Sequence[tuple[Key, Tensor]], name: str | int, what: str
) -> list[tuple[Key, Tensor]]:
    """Return the tensors of an entry that the model file names: "x", 0, "pair.0".

    Raises:
        InputError: there is none.
    """
    path = tuple(str(name).split("."))
    own = [(key, t) for key, t in found if tuple(map(str, key))[: len(path)] == path]
    if not own:
        known = ", ".join(repr(".".join(map(str, key))) for key, _ in found)
        raise InputError(
            f"{what} names {name!r}, and example_batch() has no such tensor",
            code="BX2172",
            help=f"name one of {known}",
        )
    return own


# --------------------------------------------------------------------------- offsets


def cut_offsets(offsets: Tensor, start: int, end: int) -> Tensor:
    """Return the offsets of the positions from `start` to `end`, counted from `start`."""
    return offsets.clamp(start, end) - start


def row_positions(own: Tensor, others: Sequence[Tensor], rows: int) -> int:
    """Return how many positions a row has that offsets count; 0 where they are no offsets.

    Offsets are integers that rise from 0 to the number of positions of another entry.
    """
    if not _rises_from_zero(own):
        return 0
    end = int(own[-1])
    shapes = [t.shape for t in others if t.dim() > 1 and t.shape[0] == rows]
    is_end = end > rows and any(end == shape[0] * shape[1] for shape in shapes)
    return end // rows if is_end else 0


def may_be_offsets(own: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether integers rise from 0 within the length of a flat entry: EmbeddingBag's."""
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
