"""Layers of torch, regions, complex numbers: traced to what the module computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Const, ParamRef
from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same


def test_dead_code_is_dropped_and_dice_stay() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.exp().sin()
            F.dropout(x, 0.5)
            return x.sum()

    found = capture(Model(), (torch.randn(4, 8),))
    assert [op.target for op in found.graph.ops] == ["aten.dropout.default", "aten.sum.default"]


def test_returned_parameter_is_a_value() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, self.scale

    found = capture(Model(), (torch.randn(4, 8),), lambda o, b: o[0].sum())
    last = found.graph.op[found.graph.outputs[1]]
    assert last.args == (ParamRef("scale"),)
    assert last.view_of == "scale"


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.linear(x)
            with torch.enable_grad():
                b = self.linear(x).sin()
        c = self.linear(x)
        d = F.dropout(c, 0.3)
        d.detach_()
        with torch.no_grad():
            e = F.dropout(c.view(-1, 8), 0.2).view_as(c)
        return (a * b + c * d + e * c).sum()


def test_nested_regions_and_dice_in_a_region() -> None:
    model = Nested()
    found = capture(model, (torch.randn(4, 5, 8),))
    assert_same(model, found, model)
    regions = [op for op in found.graph.ops if op.body]
    assert [(op.target, op.random) for op in regions] == [
        ("region.no_grad", False),
        ("region.no_grad", True),
    ]


class Half(nn.Module):
    """Gives two values, the first of which torch calls as an earlier one was called."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * 2


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Half()

    def forward(self, x: Tensor) -> Tensor:
        a = x * 3
        a += 1
        b, c = self.pair(a, x)
        return (b * c).sum()


def test_results_are_noted_in_the_order_of_the_module() -> None:
    graph = capture(Halves(), (torch.randn(4, 3),)).graph
    (call,) = [entry for entry in graph.arguments if entry.path == "pair"]
    b, c = call.results
    assert (graph.op[b].target, graph.op[b].module_path) == ("aten.add.Tensor", "pair")
    assert graph.op[c].target == "aten.mul.Tensor"
    x, y = (value for _, value in call.names)
    assert graph.op[x].target == "aten.add.Tensor"
    assert graph.op[x].module_path == ""
    assert y == "x"


class Clamped(nn.Module):
    """Clamps an activation in place, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        with torch.no_grad():
            h.clamp_(-0.1, 0.1)
        found: Tensor = self.two(h).square().mean()
        return found


def test_an_activation_written_without_gradient_has_one_still() -> None:
    model = Clamped()
    found = capture(model, (torch.randn(4, 6),))
    assert_same(model, found, model)
    taken = next(op for op in found.graph.ops if "clamp" in op.name)
    assert taken.outputs[0].requires_grad  # a cut there sends its gradient


def test_complex_numbers_are_arguments() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(self.one(x).view(-1, 4, 2)) * 1j + (2 - 1j)
            return z.abs().mean()

    model = Turned()
    found = capture(model, (torch.randn(4, 6),))
    assert_same(model, found, model)
    assert Const("1j") in [arg for op in found.graph.ops for arg in op.args]
    assert Const("(2-1j)").number == 2 - 1j
