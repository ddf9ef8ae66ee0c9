"""Gradients that autograd leaves in one memory, as of weights that are stacked and then summed.

Plain PyTorch adds the next micro-batch to each of them there, and clips each: several times in that
memory. A bundle's gradients have memory of their own. This file looks at what a backward has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from bigbrain_fx.core import Graph


def in_one_memory(gradients: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Name the parameters of which two have `.grad` in the same memory, in part or whole.

    What `.grad` takes as it is handed out is dense: it fills the memory from its first element on.
    """
    first: dict[int, list[tuple[int, int, str]]] = {}
    for name, grad in gradients.items():
        if grad is not None and grad.is_contiguous() and grad.numel():
            begin = grad.data_ptr()
            place = begin, begin + grad.numel() * grad.element_size(), name
            first.setdefault(grad.untyped_storage().data_ptr(), []).append(place)
    found: set[str] = set()
    for places in first.values():
        places.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(places):
            found |= {one, other} if begin < end else set()
    return tuple(name for name in gradients if name in found)


def on_one_memory(names: Sequence[str], graph: Graph) -> tuple[str, ...]:
    """Say what plain PyTorch computes otherwise where gradients are one memory."""
    if not names:
        return ()
    reader = next((op for op in graph.ops if set(names) & set(op.params) and op.source), None)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{f'{reader.source}: ' if reader else ''}the gradients of {', '.join(names[:3])}{more} "
        "are one memory in plain PyTorch, which adds the next micro-batch, clips and unscales "
        "there once for each of them; the bundle's gradients have memory of their own, and "
        "`verify` says that they differ. torch.stack([w * 1 for w in weights]) gives each its own "
        "in plain PyTorch, too",
    )
