"""A model of token rows and its example -> a model of one position and an example of that."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.cached.making import POSITION, ROW, TOKENS
from bigbrain_fx.frontend.cached.module import Cached, cached_module
from bigbrain_fx.frontend.cached.row import Row, row_of
from bigbrain_fx.frontend.cached.trial import require_same
from bigbrain_fx.frontend.tracing.blank import lent
from bigbrain_fx.frontend.tracing.step import Loss
from bigbrain_fx.frontend.translation.batch_dims import BatchDims

TRIED = 2  # rows of the trial
COPIES = 4  # of the caches, while a capture compares the module with its graph


def with_cache(
    model: nn.Module,
    example_batch: object,
    places: int,
    *,
    loss: Loss | None = None,
    autocast: str | None = None,
    batch_dims: BatchDims | None = None,
    tries: bool = True,
) -> tuple[Cached, Mapping[str, Tensor]]:
    """Return a model as one that computes single positions, and some of its example's.

    Args:
        model: of rows of tokens; it is put into eval mode and gets the caches as buffers.
        example_batch: as in `capture`.
        loss: as in `capture`.
        autocast: as in `capture`.
        batch_dims: as in `capture`.
        places: rows of keys and values in the caches.
        tries: whether the form is tried; a model without numbers gets random ones for that.

    Raises:
        InputError: its example has no rows of tokens.
        CaptureError: no form of one position was found, or the trial found other results.
    """
    row = row_of(model.eval(), example_batch, loss, autocast, batch_dims)
    module = cached_module(row, TRIED)
    if tries:
        with lent(model):
            require_same(row, module)
    _require_memory(module, places)
    module.hold(places)
    return module, _example(row, places)


def _require_memory(module: Cached, places: int) -> None:
    """Refuse caches that do not fit into this host's memory: a capture writes and compares them.

    Raises:
        CaptureError: with both numbers.
    """
    each = sum(cache[0].nbytes for cache in module.caches.values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if COPIES * (places + 1) * each > there:
        raise CaptureError(
            f"--kv-cache: keys and values of {places:,} rows take {each:,} bytes each, and a "
            "capture "
            f"holds them {COPIES} times: this host has {there:,} bytes",
            code="BX2007",
            help=f"keep fewer rows: {max(1, there // (COPIES * each) - 1):,} at most",
        )


def _example(row: Row, places: int) -> dict[str, Tensor]:
    """Return some tokens of the model's example, each at another position of another row."""
    entry = next(e for e in row.batch.entries if e.name == row.entry)
    places_now = torch.arange(row.batch.rows)
    position = places_now % row.longest
    tokens = entry.tensor[places_now, position].unsqueeze(1)
    return {TOKENS: tokens, ROW: places_now % places, POSITION: position}
