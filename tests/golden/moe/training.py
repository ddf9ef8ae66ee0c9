"""How MoE is trained; the functions are copied from moe.py.

Every device's process calls these for itself: `batches(seed)` must give all of them the same
batches (they are compared), and an optimizer sees its own device's parameters only. To
clip gradients where the model file did not, split the model again: norms are messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from runtime import adamw

VOCABULARY = 32
STRIDES = (1, 3, 5, 7)
SEQUENCE = 32
BATCH = 16  # rows per mini-batch


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows like 4, 7, 10, ...; the t-th batch depends on seed and t alone."""
    strides = torch.tensor(STRIDES)
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=dice)
        stride = strides[torch.randint(len(STRIDES), (BATCH, 1), generator=dice)]
        rows = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


INPUTS = {
    "tokens": ("tokens",),
    "targets": ("targets",),
}
SPECS = {
    "tokens": ("int64", (16, 32)),
    "targets": ("int64", (16, 32)),
}
WHOLE = ()
OPTIMIZER = adamw
LR_SCALE = None
CLIP_NORM = None
