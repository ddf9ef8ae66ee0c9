"""What a model draws in the first link of `verify`: in its order, however a plan orders ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.core import Stage, Stages
from bigbrain_fx.frontend import capture
from bigbrain_fx.verification.draws import LOOP, reseed
from bigbrain_fx.verification.reference import LoopReference
from tests.verification.test_plain import first, split


class Branches(nn.Module):
    """Two parts draw, and neither waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x) * torch.rand(4)
        return (a + nn.functional.dropout(self.b(x))).square().sum()


def test_ops_in_another_order_draw_as_the_loop_does() -> None:
    x, model = torch.randn(3, 6), Branches()
    captured = capture(model, x)
    names = [op.name for op in captured.graph.ops]
    last = [op.name for op in captured.graph.ops if op.module_path == "b" or "dropout" in op.target]
    others = [name for name in names if name not in last]
    draws = [op.name for op in captured.graph.ops if op.random]
    params = tuple(p.name for p in captured.graph.params)
    order = (*last, *others)
    assert [n for n in order if n in draws] == draws[::-1]
    key = 0, 0, 0
    reseed(key, LOOP)
    loss = model(x)
    loss.backward()
    stages = Stages((Stage(0, "d0", order, params=params),), ())
    made = LoopReference(captured.graph, stages, captured.tensors, {})
    found, gradients = made.gradients([{captured.graph.inputs[0].name: x}], 0, 0)
    assert torch.equal(found, loss.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], parameter.grad)


CAST = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def part(self, x):
        x = self.drop(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.drop(torch.tanh(self.drop(x))).float()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.drop(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = self.drop(x.float())
            x = checkpoint(lambda h: self.drop(h), x, use_reentrant=False)
        x = checkpoint(self.part, x.float(), use_reentrant=False)
        return self.drop(self.second(x)).pow(2).mean()


def model():
    return Cast()


def example_batch():
    return (torch.randn(4, 6),)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    ["", pytest.param('autocast = "bfloat16"\n', marks=pytest.mark.nightly)],
    ids=["", "of the file"],
)
def test_draws_in_regions_of_autocast_are_one_each(more: str, tmp_path: Path) -> None:
    """Checkpoints in them, and they in checkpoints, draw twice alike."""
    path = tmp_path / "cast.py"
    path.write_text(CAST + more)
    found = verify(split(path), steps=2)
    assert first(found).passed, str(found)
