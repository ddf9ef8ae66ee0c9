"""Names of the user's own code, and weights that stages share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.plan import Options, Source, make_plan
from tests.support import samples

OPS = """
import torch


class Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * {factor}

    @staticmethod
    def backward(ctx, g):
        return g * {factor}


class Scale(Stage):
    pass
"""


@pytest.fixture
def modules() -> Iterator[tuple[Any, Any]]:
    made = []
    for name, factor in (("own_ops_a", 2), ("own_ops_b", 5)):
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(OPS.format(factor=factor), name, "exec"), module.__dict__)
        made.append(module)
    yield made[0], made[1]
    for module in made:
        del sys.modules[module.__name__]


class Net(nn.Module):
    def __init__(self, a: Any, b: Any) -> None:  # modules
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.ops = a.Stage, a.Scale, b.Scale

    def forward(self, x: Tensor) -> Tensor:
        stage, scale, other = self.ops
        return self.last(other.apply(scale.apply(stage.apply(self.first(x))))).sum()


def test_each_is_called_by_a_name_of_its_own(modules: tuple[Any, Any]) -> None:
    graph = samples.of_module(Net(*modules), {"x": torch.randn(4, 6)}, None).graph
    options = Options("naive", micro_batches=1)
    text = bundle_texts(make_plan(graph, samples.cluster(1), Source(""), options))["device_d0.py"]
    assert "from own_ops_a import Stage as own_ops_a_Stage, Scale\n" in text
    assert "from own_ops_b import Scale as own_ops_b_Scale\n" in text
    assert "own_ops_b_Scale.apply(Scale.apply(own_ops_a_Stage.apply(self.first(x))))" in text


class Twice(nn.Module):
    """The same two layers at its begin and at its end: what lies between is on either device."""

    def __init__(self, *, alike: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = (self.a, self.b) if alike else (nn.Linear(8, 8), nn.Linear(8, 8))
        self.between = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.b(self.a(x)).relu())
        return self.d(self.c(x)).sum()


def stages(model: nn.Module) -> list[str]:
    graph = samples.of_module(model, {"x": torch.randn(4, 8)}, None).graph
    options = Options("naive", micro_batches=1)
    files = bundle_texts(make_plan(graph, samples.cluster(2), Source(""), options))
    return [files[f"device_d{i}.py"].split(f"class Stage{i}")[1] for i in range(2)]


def test_a_comment_names_two_users_and_counts_the_others() -> None:
    first, second = stages(Twice())
    assert "`a.weight` is stage 1's `c.weight`, `a.bias` is stage 1's `c.bias`, and so on" in first
    assert "for 2 more: in a loop of your own, too, add up their gradients." in first.replace(
        "\n    ", " "
    )
    assert "`c.weight` is stage 0's `a.weight`" in second


def test_a_stage_that_shares_nothing_says_nothing() -> None:
    assert not any("of your own" in text for text in stages(Twice(alike=False)))


@pytest.mark.gate("0")
@pytest.mark.parametrize("place", [0, 1])
def test_weights_that_do_not_train_cannot_part(place: int) -> None:
    assert "of your own" not in stages(Twice().requires_grad_(requires_grad=False))[place]
