"""How a batch's tensors lie in memory, and whether they ask for gradients: what a model goes by.

    if x.is_contiguous(): ...      ─▶ x is to lie in every batch as it does in the example

A trace keeps the answer that the example has given. The model is run with the same numbers laid
out otherwise, where a word of the user's files may ask at all. This file runs steps; it knows no
graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.hidden_state import is_costly
from bigbrain_fx.frontend.tracing.plain import Numbers, alike
from bigbrain_fx.frontend.tracing.step import Loss
from bigbrain_fx.frontend.tracing.user_words import mentions
from bigbrain_fx.frontend.tracing.values import with_value
from bigbrain_fx.frontend.translation.batch import Batch, Key
from bigbrain_fx.runtime import laid

_WORDS = re.compile(
    r"\b(is_contiguous|is_non_overlapping_and_dense|suggest_memory_format|requires_grad|grad_fn)\b"
    r"|\bstride\(|\bis_leaf\b"
)
_PICTURES = {4: torch.channels_last, 5: torch.channels_last_3d}  # by how many dimensions there are


def laid_entries(
    model: nn.Module,
    loss: Loss | None,
    example: object,
    batch: Batch,
    run: Callable[[object], Numbers],
) -> Iterator[tuple[Key, str]]:
    """Yield the entries whose layout counts, with what a run compares.

    Args:
        model: what may ask.
        loss: likewise.
        example: the user's batch.
        batch: the same, taken apart.
        run: gives the numbers of a batch. A model that is costly to run is not asked: every entry
            counts.
    """
    if not mentions(model, loss, _WORDS):
        return
    costly = is_costly(model, list(batch.sized(batch.rows).values()))
    first = None if costly else run(example)
    for entry in batch.entries:
        tensor = entry.tensor.movedim(0, entry.dim) if entry.dim else entry.tensor
        if first is None or _counts(run, first, example, entry.key, tensor):
            yield entry.key, laid(tensor)


def _counts(
    run: Callable[[object], Numbers], first: Numbers, example: object, key: Key, tensor: Tensor
) -> bool:
    """Whether the model computes something else, or fails, where a tensor is laid out otherwise."""
    try:
        others = (with_value(example, key, other) for other in _otherwise(tensor))
        return not all(alike(first, run(other)) for other in others)
    except Exception:  # view() of what is transposed: it fails in plain PyTorch, too
        return False


def _otherwise(tensor: Tensor) -> Iterator[Tensor]:
    """Yield tensors of the same numbers that lie in memory otherwise, or ask for a gradient."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dim() > 1:
        dims = range(tensor.dim())
        turned = plain.permute(*reversed(dims)).contiguous().permute(*reversed(dims))
        yield from (other.requires_grad_(tensor.requires_grad) for other in (plain, turned))
    if tensor.dim() in _PICTURES:
        pictured = plain.clone(memory_format=_PICTURES[tensor.dim()])
        yield pictured.requires_grad_(tensor.requires_grad)
    if tensor.is_floating_point() or tensor.is_complex():
        yield tensor.detach().clone().requires_grad_(not tensor.requires_grad)
