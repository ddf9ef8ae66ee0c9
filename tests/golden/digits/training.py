"""How Net is trained; the functions are copied from digits.py.

Every device's process calls these for itself: `batches(seed)` must give all of them the same
batches (they are compared), and an optimizer sees its own device's parameters only. To
clip gradients where the model file did not, split the model again: norms are messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 64  # images per mini-batch
HELD_OUT = 360  # images never trained on


def images_and_labels() -> tuple[Tensor, Tensor]:
    """Return all images (1797, 1, 8, 8) with values from 0 to 1, and their digits, shuffled once.

    The file's images stand in the order of their writers; the last HELD_OUT of the shuffle are for
    `accuracy`.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training images in a new order every epoch, without the last, partial batch."""
    images, labels = images_and_labels()
    dice = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels) - HELD_OUT, generator=dice)
        for rows in order.split(BATCH):
            if len(rows) == BATCH:
                yield images[rows], labels[rows]


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use Adam, a little faster than it comes."""
    return torch.optim.Adam(named_params, lr=5e-3)


INPUTS = {
    "images": (0,),
    "batch_1": (1,),
}
SPECS = {
    "images": ("float32", (64, 1, 8, 8)),
    "batch_1": ("int64", (64,)),
}
WHOLE = ()
OPTIMIZER = optimizer
LR_SCALE = None
CLIP_NORM = None
