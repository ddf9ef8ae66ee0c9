"""How UNet is trained; the functions are copied from unet.py.

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

SIZE = 32  # pixels per side, a multiple of 2 ** DEPTH
BATCH = 8  # images per mini-batch
DISCS = 3  # per image
NOISE = 0.3  # standard deviation, against a contrast of one


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noisy discs and their masks; the t-th batch depends on seed and t alone."""
    pixel = torch.arange(SIZE).float()
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        centre = SIZE * torch.rand(BATCH, DISCS, 2, 1, 1, generator=dice)
        radius = 3 + 4 * torch.rand(BATCH, DISCS, 1, 1, generator=dice)
        y, x = pixel[:, None] - centre[:, :, 0], pixel[None, :] - centre[:, :, 1]
        inside = x.square() + y.square() < radius.square()
        mask = inside.any(dim=1, keepdim=True).float()
        yield mask + NOISE * torch.randn(mask.shape, generator=dice), mask


INPUTS = {
    "image": (0,),
    "batch_1": (1,),
}
SPECS = {
    "image": ("float32", (8, 1, 32, 32)),
    "batch_1": ("float32", (8, 1, 32, 32)),
}
WHOLE = ()
OPTIMIZER = adamw
LR_SCALE = None
CLIP_NORM = None
