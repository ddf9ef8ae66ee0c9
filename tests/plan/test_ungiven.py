"""What may get no gradient by the data: messages and sums say so, and an optimizer sees None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, may_be_ungiven
from tests.support.bundles import cluster


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Model(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second, self.where = nn.Linear(3, 4), nn.Linear(4, 4), where

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        stopped: Any = Stop.apply(h) if self.where else h  # type: ignore[no-untyped-call]
        return self.second(stopped + h if self.where == "beside" else stopped)


def square(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def asks(output: Tensor, batch: object) -> Tensor:
    return output.square().mean() if output.sum().item() > 0 else output.mean()


@pytest.mark.nightly
def test_parameters_on_all_paths_have_a_gradient() -> None:
    x = torch.randn(8, 3)
    assert may_be_ungiven(capture(Model(""), x, square).graph) == frozenset()
    assert may_be_ungiven(capture(Model(""), x, asks).graph) == frozenset()


@pytest.mark.nightly
def test_parameters_before_an_opaque_function_may_have_none() -> None:
    x = torch.randn(8, 3)
    found = may_be_ungiven(capture(Model("alone"), x, square).graph)
    assert {"first.weight", "first.bias", "linear"} <= found
    assert not {"second.weight", "second.bias"} & found
    beside = may_be_ungiven(capture(Model("beside"), x, square).graph)
    assert "linear" in beside  # one of its uses
    assert "first.weight" not in beside


FILE = '''"""A Function whose backward gives none by the data; before it weights of both devices."""

import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if bool((ctx.saved_tensors[0].sum() * 1e3).floor() % 2) else None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # given zeros where none comes, as torch does
        return gradient * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.d(torch.tanh(self.b(MIDDLE(torch.tanh(self.a(x))))))
        return self.c(Gate.apply(self.b(torch.tanh(h))))


def model():
    return Net()


def example_batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 6)}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-2, weight_decay=0.5)
'''

WAYS = {
    "messages": Options("naive", micro_batches=1),
    "zeros before it": Options("naive", micro_batches=1),
    "replicas": Options("naive", micro_batches=2, replicas=2, zero_stage=2, sum_order="micro"),
    "members": Options("naive", micro_batches=1, tensor=2),
    "split backwards": Options("naive", micro_batches=2, schedule="zb-h1"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_without_a_gradient_is_left_alone(way: str, tmp_path: Path) -> None:
    path, options = tmp_path / "gate.py", WAYS[way]
    path.write_text(FILE.replace("MIDDLE", "Double.apply" if "zeros" in way else "torch.relu"))
    devices = 2 * (options.replicas or 1) * (options.tensor or 1)
    made = bb.split(path, cluster(devices), tmp_path / "bundle", options)
    bb.verify(made.bundle, steps=6).require_passed()
