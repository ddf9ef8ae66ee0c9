"""A smaller last batch that the data have and the model file does not mention.

A plain loop trains on it; `split` sees it in the first batches, and keeps it where a trace can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.first_batches import FEW, MOST, READ_S
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.plain_entries import nodes

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.tracing.captured import Captured
    from bigbrain_fx.frontend.translation.batch import Batch


def keeping_smaller(file: ModelFile, seed: int, captured: Captured) -> ModelFile:
    """Return a model file that says `drop_last = False` where it says nothing and its data need it.

    Args:
        file: whose first batches are read, in a fork.
        seed: of the batches.
        captured: the model, traced; with a fixed number of rows nothing can be smaller.
    """
    is_open = file.drop_last is None and file.batches is not None and file.micro is None
    if not is_open or captured.graph.static_batch is not None:
        return file
    found = apart(partial(_smaller, file, seed, captured.batch)) or {}
    return replace(file, drop_last=False) if found.get("smaller") else file


def _smaller(file: ModelFile, seed: int, batch: Batch) -> Mapping[str, str]:
    """Say whether one of the first batches has fewer rows than the example in every entry."""
    assert file.batches is not None
    is_over = budget(READ_S)
    for step, drawn in enumerate(islice(file.batches(seed), MOST)):
        values = {key: value for key, value in nodes(drawn) if isinstance(value, Tensor)}
        rows = {
            int(values[entry.key].shape[entry.dim]) if entry.key in values else -1
            for entry in batch.entries
            if entry.batched
        }
        if len(rows) == 1 and 0 < rows.pop() < batch.rows:
            return {"smaller": "yes"}
        if step + 1 >= FEW and is_over():
            break
    return {}
