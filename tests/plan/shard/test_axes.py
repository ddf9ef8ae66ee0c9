"""Axes of small models: what is found, what is whole, and what the members send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import axes, priced_axes, ruleless, sharded
from bigbrain_fx.plan.shard import pieces

ROWS, LENGTH, DIM = 3, 5, 12


class Calls(nn.Module):
    """Any function of one input and the layers given, and the mean of its square as loss."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.call = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x).pow(2).mean()


def graph_of(model: nn.Module, x: Tensor) -> Graph:
    return capture(model, {"x": x}).graph


def found(graph: Graph, kind: str) -> Axis:
    """The axis of a kind that most parameters have."""
    return max((a for a in axes(graph) if a.kind == kind), key=lambda a: len(a.params))


def attended(own: Any, x: Tensor) -> Tensor:
    q, k, v = own.qkv(x).unflatten(-1, (3, 3, 4)).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return own.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_fused_attention_is_split_by_heads() -> None:
    model = Calls(attended, qkv=nn.Linear(DIM, 3 * DIM), out=nn.Linear(DIM, DIM))
    graph = graph_of(model, torch.randn(ROWS, LENGTH, DIM))
    heads = found(graph, "heads")
    assert heads.size == 3
    places = {place.name: (place.dim, place.inner) for place in heads.params}
    assert places == {"qkv.weight": (0, 4), "qkv.bias": (0, 4), "out.weight": (1, 4)}
    assert not heads.whole
    (heads,) = priced_axes(graph, [heads])
    nbytes = ROWS * LENGTH * DIM * 4
    assert [(e.kind, e.nbytes) for e in heads.exchanges] == [("all_reduce", nbytes)]  # x is input


def test_members_hold_unequal_rows_of_a_fused_weight() -> None:
    model = Calls(attended, qkv=nn.Linear(DIM, 3 * DIM), out=nn.Linear(DIM, DIM))
    graph = graph_of(model, torch.randn(ROWS, LENGTH, DIM))
    made = sharded(graph, [found(graph, "heads")], (2, 1))
    shapes = [member.param["qkv.weight"].spec.shape for member in made.members]
    assert shapes == [(24, DIM), (12, DIM)]
    shard = next(s for s in made.shards if s.param == "qkv.weight" and s.member == 1)
    assert (shard.dim, shard.size, shard.inner, shard.start, shard.stop) == (0, 3, 4, 2, 3)
    names = [[op.name for op in member.ops] for member in made.members]
    assert names[0] == names[1]


def grouped(own: Any, x: Tensor) -> Tensor:
    q = own.q(x).unflatten(-1, (-1, 2)).transpose(1, 2)
    k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (own.k, own.v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return own.out(mixed.transpose(1, 2).flatten(2))


def test_grouped_queries_are_split_in_whole_groups() -> None:
    layers = {"q": nn.Linear(DIM, 12), "k": nn.Linear(DIM, 6), "v": nn.Linear(DIM, 6)}
    model = Calls(grouped, **layers, out=nn.Linear(12, DIM))
    heads = found(graph_of(model, torch.randn(ROWS, LENGTH, DIM)), "heads")
    assert heads.size == 3
    inner = {place.name: place.inner for place in heads.params if "weight" in place.name}
    assert inner == {"q.weight": 4, "k.weight": 2, "v.weight": 2, "out.weight": 4}


def attend(own: Any, *parts: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return own.out(mixed.transpose(1, 2).flatten(2))


def by_slices(own: Any, x: Tensor) -> Tensor:
    both = own.qkv(x)
    return attend(own, both[..., :12], both[..., 12:18], both[..., -6:])


def by_narrow(own: Any, x: Tensor) -> Tensor:
    both = own.qkv(x)
    return attend(own, both.narrow(-1, 0, 12), both.narrow(-1, 12, 6), both.narrow(-1, 18, 6))


def by_rows(own: Any, x: Tensor) -> Tensor:
    weights, biases = (own.qkv.weight, own.qkv.bias)
    cuts = slice(0, 12), slice(12, 18), slice(18, 24)
    return attend(own, *(F.linear(x, weights[cut], biases[cut]) for cut in cuts))


FUSED: dict[str, Callable[..., Tensor]] = {
    "split": lambda own, x: attend(own, *own.qkv(x).split((12, 6, 6), -1)),
    "slices": by_slices,
    "narrow": by_narrow,
    "rows": by_rows,
}


@pytest.mark.gate("slices")
@pytest.mark.parametrize("how", ["split", "slices", "narrow", "rows"])
def test_fused_grouped_queries_of_unequal_rows_are_split_by_heads(how: str) -> None:
    model = Calls(FUSED[how], qkv=nn.Linear(DIM, 24), out=nn.Linear(12, DIM))
    heads = found(graph_of(model, torch.randn(ROWS, LENGTH, DIM)), "heads")
    assert heads.size == 3
    places = {place.name: (place.dim, place.inner) for place in heads.params}
    fused = (0, (4, 2, 2))
    assert places == {"qkv.weight": fused, "qkv.bias": fused, "out.weight": (1, 4)}
    assert not heads.whole


def joined_rows(own: Any, x: Tensor) -> Tensor:
    weight = torch.cat([part.weight for part in (own.q, own.k, own.v)])
    return attend(own, *F.linear(x, weight).split((12, 6, 6), -1))


def test_weights_of_unequal_rows_that_are_joined_are_split_by_heads() -> None:
    layers = {"q": nn.Linear(DIM, 12, False), "k": nn.Linear(DIM, 6, False)}
    model = Calls(joined_rows, **layers, v=nn.Linear(DIM, 6, False), out=nn.Linear(12, DIM))
    heads = found(graph_of(model, torch.randn(ROWS, LENGTH, DIM)), "heads")
    assert heads.size == 3
    assert {place.name for place in heads.params} == {f"{n}.weight" for n in ("q", "k", "v", "out")}
    assert not heads.whole


def beside(own: Any, x: Tensor) -> Tensor:
    q, k, v, hidden = own.both(x).split((12, 6, 6, 30), -1)
    q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return own.out(torch.cat((mixed.transpose(1, 2).flatten(2), F.gelu(hidden)), -1))


def test_an_mlp_beside_attention_is_split_with_its_heads() -> None:
    model = Calls(beside, both=nn.Linear(DIM, 54), out=nn.Linear(42, DIM))
    graph = graph_of(model, torch.randn(ROWS, LENGTH, DIM))
    heads = found(graph, "heads")
    places = {place.name: (place.dim, place.inner) for place in heads.params}
    assert places["both.weight"] == (0, (4, 2, 2, 10))
    assert places["out.weight"] == (1, (4, 10))
    assert not heads.whole
    (heads,) = priced_axes(graph, [heads])
    assert [e.kind for e in heads.exchanges] == ["all_reduce"]


def test_slices_that_overlap_are_no_pieces() -> None:
    model = Calls(
        lambda own, x: own.b(own.a(x)[..., :8]) + own.b(own.a(x)[..., 4:]),
        a=nn.Linear(DIM, 12),
        b=nn.Linear(8, DIM),
    )
    graph = graph_of(model, torch.randn(ROWS, DIM))
    assert not any({"a.weight", "b.weight"} <= {p.name for p in a.params} for a in axes(graph))


def test_depthwise_and_grouped_filters_are_split() -> None:
    model = Calls(
        lambda own, x: own.last(F.relu(own.deep(own.first(x)))),
        first=nn.Conv2d(3, 6, 1),
        deep=nn.Conv2d(6, 12, 3, groups=6),
        last=nn.Conv2d(12, 2, 1),
    )
    graph = graph_of(model, torch.randn(ROWS, 3, 6, 6))
    channels = max((a for a in axes(graph) if a.size == 6), key=lambda a: len(a.params))
    assert {place.name for place in channels.params} == {
        "first.weight", "first.bias", "deep.weight", "deep.bias", "last.weight"
    }  # fmt: skip
    member = sharded(graph, [channels], (2, 1)).members[1]
    assert next(op for op in member.ops if op.name == "conv2d_1").args[6] == 2


def shuffled(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


@pytest.mark.gate("glu--", "pixel_shuffle--")
@pytest.mark.parametrize(
    ("op", "layer", "last"),
    [
        ("conv2d_1", nn.Conv2d(12, 6, 1, groups=3), nn.Conv2d(6, 2, 1)),
        ("conv_transpose2d", nn.ConvTranspose2d(12, 6, 2, groups=3), nn.Conv2d(6, 2, 1)),
        ("group_norm", nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1)),
        ("glu", nn.GLU(1), nn.Conv2d(6, 2, 1)),
        ("pixel_shuffle", nn.PixelShuffle(2), nn.Conv2d(3, 2, 1)),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_groups_of_shuffled_channels_are_whole(op: str, layer: nn.Module, last: nn.Module) -> None:
    """A member has every third channel, or every fourth: of no group all of it.

    Filters within each group can be divided, of all channels.
    """
    groups = 4 if isinstance(layer, nn.GLU) else 3
    model = Calls(
        lambda own, x: own.last(own.layer(shuffled(own.first(x), groups))),
        first=nn.Conv2d(3, 12, 1),
        layer=layer,
        last=last,
    )
    graph = graph_of(model, torch.randn(ROWS, 3, 4, 4))
    divided = [a for a in axes(graph) if {op} & {*a.along, *a.summed} and a.kind != "sequence"]
    assert all(a.size == 2 and a.params and op not in a.summed for a in divided), divided


def test_a_norm_and_an_op_without_a_rule_are_whole_and_named() -> None:
    model = Calls(
        lambda own, x: own.two(own.norm(own.one(x)).renorm(2, 0, 1.0)),
        one=nn.Linear(DIM, 8),
        norm=nn.LayerNorm(8),
        two=nn.Linear(8, DIM),
    )
    graph = graph_of(model, torch.randn(ROWS, DIM))
    assert ruleless(graph) == {"aten.renorm.default": 1}
    one = next(a for a in axes(graph) if "one.weight" in {p.name for p in a.params} and a.size == 8)
    assert one.whole == ("layer_norm",)
    (one,) = priced_axes(graph, [one])
    assert [(e.kind, e.at) for e in one.exchanges] == [("all_gather", "linear_whole")]


def test_an_axis_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2,000 ops took 2.5 s, each of three times that they were asked for."""
    model = Calls(attended, qkv=nn.Linear(DIM, 3 * DIM), out=nn.Linear(DIM, DIM))
    graph = graph_of(model, torch.randn(ROWS, LENGTH, DIM))
    before = priced_axes(graph, axes(graph))
    monkeypatch.setattr(pieces, "exchanges", None)
    assert priced_axes(graph, axes(graph)) == before
    assert any(axis.exchanges for axis in before)


def test_two_axes_that_meet_in_a_parameter_are_refused() -> None:
    graph = graph_of(Calls(lambda own, x: own.a(x), a=nn.Linear(DIM, 8)), torch.randn(ROWS, DIM))
    with pytest.raises(InputError, match=r"'a\.weight' has two of the axes"):
        sharded(graph, [a for a in axes(graph) if a.params], (1, 1))


def test_without_axes_members_have_the_whole_graph_of_what_sees_memory() -> None:
    """As `explain` has it, which asks what the plan's only axis sends."""
    model = Calls(lambda own, x: own.b(own.drop(own.a(x))), a=nn.Linear(DIM, 8), b=nn.Linear(8, 2))
    model.drop = nn.Dropout(0.1)
    graph = graph_of(model.train(), torch.randn(ROWS, DIM))
    assert any(op.random for op in graph.ops)
    assert sharded(graph, [], (1, 1)).members == (graph, graph)
