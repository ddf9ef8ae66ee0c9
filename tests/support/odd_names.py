"""A model file whose names are keywords, hold quotes or newlines, or are the runtime's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = (
    "class",
    "lambda",
    "a b",
    "quo\"te's",
    '"""',
    "new\nline",
    "back\\slash",
    "é",
    "字",
    "0",
    "007",
    "-1",
    "#",
    "{x}",
    "%s",
    "self",
    "torch",
    "__init",
    "key",
    "seeded",  # from here on: what regions, stages and holders call their own methods
    "empty",
    "path",
    "call",
    "place",
    "hold",
    "tie",
    "nth",
    "device",
    "returns",
)
DIM = 4


class Odd(nn.Module):
    """One of these is called `key`; it drops out, under a key."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(DIM, DIM))
        self.drop = nn.Dropout(0.1)
        for name in NAMES:
            holder = nn.Module()
            holder.register_parameter(name, nn.Parameter(torch.randn(DIM)))
            holder.register_buffer(f"{name}?", torch.randn(DIM))
            setattr(self, f"{name}!", holder)

    def forward(self, stage: Tensor, micro: Tensor) -> Tensor:
        """Run all layers in a row; the inputs are called as the runtime calls its arguments."""
        x = stage
        for name in NAMES:
            holder = self.get_submodule(f"{name}!")
            weight, shift = holder._parameters[name], holder._buffers[f"{name}?"]
            assert weight is not None
            layer = self.get_submodule(name)
            x = x + self.drop(torch.tanh(layer(x) * weight + shift))
        return F.mse_loss(x, micro)


class Twice(nn.Module):
    """Two equal blocks with the runtime's names inside, so that there is a class for them."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        blocks = [Attention() for _ in range(4)]
        blocks[3].key.weight = blocks[0].key.weight
        self.key = nn.ModuleList(blocks)

    def forward(self, stage: Tensor, micro: Tensor) -> Tensor:
        x = stage
        for block in self.key:
            x = block(x)
        return self.odd(x, micro)


class Attention(nn.Module):
    """As so many are written: query, key, value."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("path", torch.ones(DIM))
        self.call = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return x + self.drop(torch.softmax(query * key, -1) * value * self.path) * self.call


def model() -> nn.Module:
    return Twice()


def example_batch() -> dict[str, Tensor]:
    return {"stage": torch.randn(8, DIM), "micro": torch.randn(8, DIM)}
