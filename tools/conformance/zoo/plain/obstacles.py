"""Obstacles to a trace, each beside the form that is none."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tools.conformance.zoo.case import Case
from tools.conformance.zoo.plain.autograd import Inner
from tools.conformance.zoo.plain.shared import (
    energy,
    mse,
    stack,
    vectors,
)


class Branching(Inner):
    """Clamps when something overflowed: a value decides."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not torch.isfinite(y).all():
            y = torch.nan_to_num(y)
        return y


class Reading(Inner):
    """Uses a value as a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.abs().max().item())


class Dropping(nn.Module):
    """Drops layers with Python's dice."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


class ReadingNone(Inner):
    """The same, kept in a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.detach().abs().max()


class DroppingByTorch(Dropping):
    """Drops layers with torch's dice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.where(torch.rand(()) < 0.5, block(x), x)
        return x


class Selecting(Inner):
    """Selects rows: the shape depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class Masking(Inner):
    """Masks rows instead."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, super().forward(x), 0.0)


CASES = (
    stack("branch-on-data", Branching),
    stack("item", Reading),
    stack("item-remedied", ReadingNone),
    stack("item-leaf", Reading, leaves=("Reading",)),
    Case("python-dice", Dropping, vectors, mse, refused=True, remedy="python-dice-remedied"),
    Case("python-dice-remedied", DroppingByTorch, vectors, mse),
    Case(
        "rows-by-data",
        lambda _: Selecting(),
        vectors,
        energy,
        depth=0,
        refused=True,
        remedy="rows-by-data-remedied",
    ),
    Case("rows-by-data-remedied", lambda _: Masking(), vectors, energy, depth=0),
)
