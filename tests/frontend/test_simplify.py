"""Roundabout calls of a trace become plain ones; what only looks idle stays."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same

D = 8


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


class Cached(nn.Module):
    """Joins its keys to an empty cache, as a first step of generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(x).view(x.shape[0], 2, 4).transpose(1, 2)
        return torch.cat([torch.tensor([]), keys], dim=-2) * 2


def test_an_empty_cache_is_a_copy() -> None:
    model = Cached()
    found = capture(model, torch.randn(4, D), mean_square)
    targets = [op.target for op in found.graph.ops]
    assert "aten.cat.default" not in targets
    assert "aten.contiguous.default" in targets
    constants = {p.name for p in found.graph.params if p.kind == "constant"}
    assert not any(constants.intersection(op.params) for op in found.graph.ops)
    assert_same(model, found, lambda x: mean_square(model(x), None))


class Promoting(Cached):
    """An empty tensor of doubles makes the result one of doubles."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.float64), self.key(x)], dim=0)


def test_an_empty_part_that_changes_the_dtype_stays() -> None:
    model = Promoting()
    found = capture(model, torch.randn(4, D), mean_square)
    assert "aten.cat.default" in [op.target for op in found.graph.ops]
    assert_same(model, found, lambda x: mean_square(model(x), None))


class DroppingInPlace(nn.Module):
    """Dropout that writes into its argument: into a view, and into what nothing else shares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x).flatten(1))
        return self.drop(self.linear(y))


def test_dropout_in_place_is_no_idle_call() -> None:
    model = DroppingInPlace()
    found = capture(model, torch.randn(4, D), mean_square)
    assert sum(op.random for op in found.graph.ops) == 2
    assert_same(model, found, lambda x: mean_square(model(x), None))


@torch.library.custom_op("bigbrain_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Double a tensor, as an op of a library."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda _ctx, gradient: gradient * 2)


class WithLibraryOp(nn.Module):
    """Calls an op that a Python library made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x))


def test_an_op_of_a_library_is_kept_by_name_with_its_module() -> None:
    model = WithLibraryOp()
    found = capture(model, torch.randn(4, D), mean_square)
    target = next(op.target for op in found.graph.ops if "twice" in op.target)
    assert target == f"library.bigbrain_tests.twice.default.{__name__}.twice"
    assert_same(model, found, lambda x: mean_square(model(x), None))
