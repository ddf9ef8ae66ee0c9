"""Entries of a batch that hold offsets into another entry: they are no rows of it."""

from __future__ import annotations

import math

import torch

from bigbrain_fx.frontend.translation.batch import Batch, Entry


def may_be_offsets(entry: Entry, batch: Batch) -> bool:
    """Whether whole numbers rise to the length of another entry, or of its rows laid end to end.

    `cu_seqlens`, the offsets of an EmbeddingBag: each says where a part of another entry begins.
    """
    own = entry.tensor
    if own.dim() != 1 or own.dtype not in (torch.int32, torch.int64) or own.is_meta:
        return False
    if len(own) < 2 or bool((own[1:] < own[:-1]).any()) or int(own[0]) != 0:
        return False
    return int(own[-1]) in _lengths(entry, batch) or _are_starts(own, entry, batch)


def _are_starts(own: torch.Tensor, entry: Entry, batch: Batch) -> bool:
    """Whether the numbers are where parts begin, without the end of the last: EmbeddingBag's."""
    flat = [e for e in batch.entries if e is not entry and e.tensor.dim() == 1]
    ends = [len(e.tensor) for e in flat if not e.batched]
    return any(len(own) - 1 <= int(own[-1]) < end for end in ends)


def _lengths(entry: Entry, batch: Batch) -> set[int]:
    """Return the sizes of the other entries, along their leading dimensions taken together."""
    others = [e.tensor.shape for e in batch.entries if e is not entry]
    return {math.prod(s[: d + 1]) for s in others for d in range(len(s))} - {1}
