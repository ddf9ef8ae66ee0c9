"""How Llama is trained; the functions are copied from llama.py.

Every device's process calls these for itself: `batches(seed)` must give all of them the same
batches (they are compared), and an optimizer sees its own device's parameters only. To
clip gradients where the model file did not, split the model again: norms are messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

ALPHABET = "0123456789+=\n"
SUMS = 9  # "7+5=12\n" per row
BATCH = 16  # rows per mini-batch
WARMUP = 5  # steps


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows of sums written out; the t-th batch depends on seed and t alone."""
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        pairs = torch.randint(10, (BATCH, SUMS, 2), generator=dice).tolist()
        lines = ["".join(f"{a}+{b}={a + b:02}\n" for a, b in row) for row in pairs]
        rows = torch.tensor([[ALPHABET.index(letter) for letter in line] for line in lines])
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW on everything alike."""
    return torch.optim.AdamW(named_params, lr=1e-2, betas=(0.9, 0.95))


def lr_scale(step: int) -> float:
    """Rise to the full learning rate over the first steps."""
    return min(1.0, (step + 1) / WARMUP)


INPUTS = {
    "tokens": ("tokens",),
    "targets": ("targets",),
}
SPECS = {
    "tokens": ("int64", (16, 62)),
    "targets": ("int64", (16, 62)),
}
WHOLE = ()
OPTIMIZER = optimizer
LR_SCALE = lr_scale
CLIP_NORM = 1.0
