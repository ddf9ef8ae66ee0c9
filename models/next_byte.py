"""A model for bigbrain-fx: it guesses the next byte of a text from the sixteen before it.

    bigbrain-fx split model.py --devices cluster.json --out bundle
    bigbrain-fx run bundle --steps 30

The names below are what bigbrain-fx looks for. It runs this file when it splits the model; the
bundle gets its own copy of `batches` and `optimizer`.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 16  # bytes that the model sees
BATCH = 64  # rows of a mini-batch; a multiple of --micro-batches


class Block(nn.Module):
    """A residual block; as long as it is one class, the bundle has one class for it, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.enter = nn.Linear(32 * CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        x = self.enter(self.embed(context).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """Required. Return the model; a class or an instance called `model` would do as well."""
    return NextByte()


def example_batch() -> dict[str, Tensor]:
    """Required. Return one mini-batch; dimension 0 is the batch.

    Entries that are named like arguments of `forward` are passed to it; the others are for `loss`.
    """
    return next(batches(seed=0))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Optional. Without it the model returns its loss, or an object with `.loss`."""
    return F.cross_entropy(output, batch["target"])


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Optional. Yield mini-batches; step t takes the t-th, on every device.

    Here each step has a generator of its own, so that step 1000 can be had without the 999 before.
    """
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    step = 0
    while True:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        start = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        context = text[start[:, None] + torch.arange(CONTEXT)]
        yield {"context": context, "target": text[start + CONTEXT]}
        step += 1


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Optional. Called on each device with its own parameters; default: AdamW as it comes."""
    return torch.optim.AdamW(named_params, lr=2e-3)


# More that may be here:
#
# def lr_scale(step: int) -> float:      # a factor on every learning rate
#     return min(1.0, (step + 1) / 100)
#
# def scheduler(optimizer):              # or a scheduler, stepped after every training step
#     return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
#
# clip_norm = 1.0                        # limit of the gradient's norm over all devices
# autocast = "bfloat16"                  # compute in this type where torch deems it safe; or
# autocast = "float16"                   # on GPUs without bfloat16, with
# grad_scaler = True                     # torch.amp.GradScaler, over all devices
