"""Shares of graphs with opaque parts, or traced for one number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.verification.members import same_graph
from bigbrain_fx.verification.sharding import agree
from tests.support.training import HEADS, bench_of, grouped


class Scaled(nn.Module):
    """A weight that is divided, and read whole under no_grad, in a region within a region, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        h = self.up(input).relu()
        with torch.no_grad():
            scale = 1 / (1 + self.up.weight.norm())
            with torch.enable_grad():
                again = nn.functional.linear(input, self.up.weight).sum(-1, keepdim=True)
            twice = again * 2
        out: Tensor = self.down(h) * scale + again * 0.1 + twice * 0.1
        return out


def test_a_region_reads_a_divided_weight_whole() -> None:
    """Each member took the norm of its own rows."""
    torch.manual_seed(0)
    found = capture(Scaled(), {"input": torch.randn(4, 6)}, lambda out, _: out.square().mean())
    hidden = next(a for a in axes(found.graph) if a.size == 8)
    assert any(place.name == "up.weight" for place in hidden.params)
    result = agree(found, [hidden], (3, 1), exact=True)
    assert max(result.gradients, result.loss) <= 1e-12


class Beside(nn.Module):
    """A layer, and an opaque module that reads the layer's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight.sum()


def test_inputs_of_an_opaque_module_are_not_divided() -> None:
    """Its weight was each member's own rows."""
    torch.manual_seed(0)
    up = nn.Linear(6, 8)
    model = nn.Sequential(Beside(up.weight), up, nn.ReLU(), nn.Linear(8, 4))
    batch = {"input": torch.randn(4, 6)}
    found = capture(model, batch, lambda out, _: out.square().mean(), leaves=["Beside"])
    divided = {place.name for axis in axes(found.graph) for place in axis.params}
    assert not divided & {"0.weight", "1.weight"}


class Paired(nn.Module):
    """Rows in pairs: the trace of a micro-batch of two rows holds for two alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.sides = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) + self.sides).pow(2).sum()


@pytest.mark.nightly
def test_a_trace_for_one_number_of_rows_is_compared_with_that_many() -> None:
    """The example's eight rows do not fit it: `verify` crashed."""
    bench = bench_of(HEADS)
    two = capture(Paired(), {"x": torch.randn(8, 4)}, micro_batch=2)
    assert two.graph.static_batch == 2
    assert two.batch.rows == 8
    chosen = chosen_axes(priced_axes(two.graph, axes(two.graph)), 2)
    plan = grouped(bench, 2)
    assert plan.placement.tensor is not None
    tensor = replace(plan.placement.tensor, axes=chosen, shares=(2, 1))
    placed = replace(plan.placement, tensor=tensor)
    checked = same_graph(two, replace(plan, placement=placed))
    assert checked["passed"], checked
