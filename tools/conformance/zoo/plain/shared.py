"""Parts that the plain models share: batches, losses, and a stack of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case

ROWS, WIDTH = 8, 16


def mse(output: Tensor, batch: Any) -> Tensor:
    """Return the mean squared error to y."""
    return F.mse_loss(output, batch["y"])


def energy(output: Tensor, _: Any) -> Tensor:
    """Return a loss that needs no target."""
    return output.square().mean()


def vectors() -> Batch:
    """Return rows of WIDTH numbers, and targets alike."""
    return {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}


def sequences() -> Batch:
    """Return sequences of six vectors, and targets alike."""
    return {"x": torch.randn(ROWS, 6, WIDTH), "y": torch.randn(ROWS, 6, WIDTH)}


def pictures(channels: int = 3, side: int = 16) -> Callable[[], Batch]:
    """Return a maker of square pictures of four classes."""

    def make() -> Batch:
        return {"x": torch.randn(ROWS, channels, side, side), "y": torch.randint(0, 4, (ROWS,))}

    return make


def classes_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the cross entropy to classes y."""
    return F.cross_entropy(output, batch["y"])


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(
    name: str,
    block: Callable[[], nn.Module],
    batch: Callable[[], Batch] = vectors,
    *,
    refused: bool = False,
    remedy: str = "",
    leaves: tuple[str, ...] = (),
    autocast: str | None = None,
) -> Case:
    """Return a case of so many blocks in a stack, trained to the mean squared error."""

    def build(depth: int) -> nn.Module:
        return Stack(block, depth)

    return Case(name, build, batch, mse, autocast, refused=refused, remedy=remedy, leaves=leaves)
