"""What a model draws in the first link of `verify`: in its order, however a plan orders ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Stage, Stages
from bigbrain_fx.frontend import capture
from bigbrain_fx.verification.draws import LOOP, reseed
from bigbrain_fx.verification.reference import LoopReference


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
