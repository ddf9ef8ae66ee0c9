"""Rewritten graphs lie as they say, and a place that computes something else is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Ref, Rewrite
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture, laid_out, prove
from bigbrain_fx.plan import rewrite_places, rewrite_trial, rewritten_graph
from tests.support.captured import assert_flags, run

ROWS = 4


class Attention(nn.Module):
    """Scores and values, as a person writes them; q and k have widths unlike v's."""

    def __init__(self, bias: bool = True, scale: float = 4.0) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.q = nn.Linear(8, 8, bias=bias)
        self.k = nn.Linear(8, 8, bias=bias)
        self.v = nn.Linear(8, 4, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        q, k, v = self.q(x), self.k(x).transpose(1, 2), self.v(x)
        return ((q @ k / self.scale).softmax(-1) @ v).sum()


class Flattened(Attention):
    """Views that a part of a wider tensor has not."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x).view(-1) * self.k(x).view(-1)).sum() + self.v(x).sum()


def captured(model: nn.Module, *shape: int) -> Captured:
    torch.manual_seed(0)
    return capture(model, {"x": torch.randn(ROWS, *shape)}, lambda output, _batch: output)


def rewritten(found: Captured, *names: Rewrite) -> Captured:
    places = rewrite_places(found.graph, names)
    assert {place.rewrite for place in places} == set(names)
    fresh = [op.name for place in places for op in place.made]
    return replace(found, graph=laid_out(rewritten_graph(found.graph, places), fresh))


def gradients(found: Captured) -> dict[str, Tensor]:
    loss = run(found, found.inputs())[found.graph.loss or ""]
    names = [p.name for p in found.graph.params if p.spec.requires_grad]
    made = torch.autograd.grad(loss, [found.tensors[name] for name in names])
    return {"loss": loss.detach()} | dict(zip(names, made, strict=True))


@pytest.mark.gate("False")
@pytest.mark.parametrize("bias", [True, False])
def test_each_parameter_gets_the_gradient_of_plain_pytorch(bias: bool) -> None:
    model = Attention(bias).double()
    torch.manual_seed(0)
    found = capture(
        model, {"x": torch.randn(ROWS, 16, 8, dtype=torch.float64)}, lambda output, _batch: output
    )
    other = rewritten(found, "linears", "scales")
    assert_flags(other)
    loss = model(found.inputs()["x"])
    loss.backward()
    own = gradients(other)
    assert torch.allclose(own["loss"], loss, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(own[name], parameter.grad, rtol=0, atol=1e-12), name


def test_what_autograd_keeps_is_measured_anew() -> None:
    other = rewritten(captured(Attention(), 16, 8), "linears")
    product = next(op for op in other.graph.ops if op.name.endswith("_together"))
    assert product.saves is not None
    assert {product.refs[i] for i in product.saves.values} == {"linear", "linear_1_weights"}
    assert all(op.saves or not op.target.startswith("aten.") for op in other.graph.ops)


def test_a_view_that_a_part_has_not_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"view.* fails on it"):
        rewritten(captured(Flattened(), 16, 8), "linears")


@pytest.mark.gate("4.0-True")
@pytest.mark.parametrize(("scale", "same"), [(4.0, True), (3.0, False)])
def test_a_power_of_two_moves_with_the_same_bits(scale: float, same: bool) -> None:
    graph = captured(Attention(scale=scale), 16, 8).graph
    (place,) = rewrite_places(graph, ["scales"])
    proof = prove(rewrite_trial(graph, place, ROWS))
    assert proof.why is None
    assert proof.same_bits is same
    assert (proof.apart > 0) is not same


def swapped(after: Graph) -> Graph:
    """Take two parts for one another."""
    places = {"linear_1": 1, "linear_2": 0}
    return replace(
        after,
        ops=tuple(
            replace(op, args=(op.args[0], places[op.name])) if op.name in places else op
            for op in after.ops
        ),
    )


def unscaled(after: Graph) -> Graph:
    """Scale by another number, a little."""
    ops = (
        replace(op, args=(op.args[0], 4.00001)) if op.target.startswith("aten.div") else op
        for op in after.ops
    )
    return replace(after, ops=tuple(ops))


def detached(after: Graph) -> Graph:
    """Stop the gradient of the first part."""
    first = after.op["linear_1"]
    inner = replace(first, name="inner")
    out = replace(first, target="aten.detach.default", args=(Ref("inner"),))
    ops = (made for op in after.ops for made in ((inner, out) if op is first else (op,)))
    return replace(after, ops=tuple(ops))


@pytest.mark.gate("scales-unscaled-allowed")
@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("linears", swapped, "result linear_1 differs"),
        ("scales", unscaled, "allowed"),
        ("linears", detached, "gradient of"),
    ],
)
def test_a_wrong_rewrite_is_refused(
    name: Rewrite, broken: Callable[[Graph], Graph], why: str
) -> None:
    graph = captured(Attention(), 16, 8).graph
    (place,) = rewrite_places(graph, [name])
    trial = rewrite_trial(graph, place, ROWS)
    assert prove(trial).why is None
    assert why in str(prove(replace(trial, after=broken(trial.after))).why)


def test_under_autocast_sixteen_bits_are_rounding() -> None:
    torch.manual_seed(0)
    found = capture(
        Attention(),
        {"x": torch.randn(ROWS, 16, 8)},
        lambda output, _batch: output,
        autocast="bfloat16",
    )
    other = rewritten(found, "linears")
    assert other.graph.op["linear_1"].outputs[0].dtype == "bfloat16"
    (place,) = rewrite_places(found.graph, ["linears"])
    proof = prove(rewrite_trial(found.graph, place, ROWS))
    assert proof.why is None
