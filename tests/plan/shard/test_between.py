"""What is left of the sequence between the ops that other axes divide, and what members send."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.plan import axes, chosen_axes, priced_axes, sharded
from bigbrain_fx.plan.shard import between
from bigbrain_fx.plan.tensor.messages import sent_share
from tests.plan.shard.test_axes import Calls, attended, graph_of

ROWS, LENGTH, DIM = 4, 6, 12


def block(own: Any, x: Tensor) -> Tensor:
    x = own.first(x)
    x = x + attended(own, own.norm1(x))
    return x + own.down(F.gelu(own.up(own.norm2(x))))


def model() -> nn.Module:
    return Calls(
        block,
        first=nn.LayerNorm(DIM),
        norm1=nn.LayerNorm(DIM),
        qkv=nn.Linear(DIM, 3 * DIM),
        out=nn.Linear(DIM, DIM),
        norm2=nn.LayerNorm(DIM),
        up=nn.Linear(DIM, 4 * DIM),
        down=nn.Linear(4 * DIM, DIM),
    )


def divided(graph: Graph, members: int) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the axes of heads and hidden units, and what they leave of the sequence."""
    every = priced_axes(graph, axes(graph))
    chosen = chosen_axes(every, members, ("heads", "hidden"))
    return chosen, between(graph, every, chosen)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(model(), torch.randn(ROWS, LENGTH, DIM))


def targets(graph: Graph, names: tuple[str, ...]) -> list[str]:
    return [graph.op[name].target.split(".")[1] for name in names]


def test_norms_and_residual_sums_are_left(graph: Graph) -> None:
    chosen, (left,) = divided(graph, 2)
    assert sorted(axis.kind for axis in chosen) == ["heads", "hidden"]
    assert (left.kind, left.size) == ("sequence", LENGTH)
    assert targets(graph, left.along) == [
        "layer_norm",
        "layer_norm",
        "add",
        "layer_norm",
        "add",
        "pow",
    ]
    assert not left.params  # of the norms: whole, and their gradients are added
    busy = {name for axis in chosen for name in (*axis.along, *axis.summed)}
    assert not busy & set(left.along)


@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (1, 1, 1), (3, 2, 1)])
def test_sums_become_scatters_and_gathers(graph: Graph, shares: tuple[int, ...]) -> None:
    chosen, left = divided(graph, len(shares))
    made = sharded(graph, (*chosen, *left), shares)
    for member, own in enumerate(made.members):
        kinds = [op.target for op in own.ops if op.target.startswith("shard.")]
        assert kinds.count("shard.reduce_scatter") == 2  # after attention, and after the MLP
        assert kinds.count("shard.gather_to_group") == 2  # before each of them
        assert kinds.count("shard.copy_to_group") == 8  # three norms, and the biases of two sums
        lengths = [op.args[3] for op in own.ops if op.target == "shard.reduce_scatter"]
        (parts,) = set(lengths)
        assert isinstance(parts, tuple)
        residual = own.op["add_1"].outputs[0].shape
        assert residual[1] == parts[member]
        assert sum(map(int, map(str, parts))) == LENGTH


@pytest.mark.nightly
@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_sum_in_halves_sends_no_more_than_a_whole_one(members: int) -> None:
    """A block in the middle of others sends as many bytes as without; of two members, too."""
    wide = Calls(
        lambda own, x: own.norm2(own.first(x) + own.down(F.gelu(own.up(own.norm1(x))))),
        first=nn.LayerNorm(64),
        norm1=nn.LayerNorm(64),
        norm2=nn.LayerNorm(64),
        up=nn.Linear(64, 256),
        down=nn.Linear(256, 64),
    )
    graph = graph_of(wide, torch.randn(ROWS, 64, 64))
    chosen, left = divided(graph, members)
    (plain,) = priced_axes(graph, chosen)
    own = sharded(graph.at(ROWS), (*chosen, *left), (1,) * members).members[0]
    whole = ROWS * 64 * 64 * 4
    both = [op for op in own.ops if op.target in ("shard.reduce_scatter", "shard.gather_to_group")]
    sent = sum(2 * whole * sent_share(op.target[6:], whole // 4, members) for op in both)
    before = sum(e.nbytes * sent_share(e.kind, e.nbytes // 4, members) for e in plain.exchanges)
    assert len(both) == len(plain.exchanges) == 2
    assert sent == pytest.approx(before)


def test_large_weights_and_whole_numbers_stay_whole() -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        order = x.detach().argsort(1).argsort(1)  # positions: no gradient
        return own.table(x).relu() * (order + 1).unsqueeze(-1)[..., 0]

    graph = graph_of(Calls(forward, table=nn.Linear(64, 64)), torch.randn(2, 3, 64))
    for left in between(graph, axes(graph), ()):
        assert all(graph.op[name].requires_grad for name in left.along)
        for name in left.along:
            params = sum(graph.param[p].spec.numel for p in graph.op[name].params)
            made = math.prod(map(int, graph.at(2).op[name].outputs[0].shape))
            assert 8 * params <= made


def test_values_written_in_place_stay_whole() -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        x = own.norm(x)
        made = own.down(F.gelu(own.up(x)))
        made[:, 0] = 0.0
        return own.norm2(made)

    layers = {"norm": nn.LayerNorm(8), "norm2": nn.LayerNorm(8)}
    linear = {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    graph = graph_of(Calls(forward, **layers, **linear), torch.randn(4, 6, 8))
    written = {name for op in graph.ops for name in op.mutates}
    assert written
    _, found = divided(graph, 2)
    for left in found:
        assert not written & {*left.along, *(place.name for place in left.values)}


def test_a_norm_that_two_parts_share_is_added_at_once() -> None:
    """One whole op and one divided op read a weight: its gradients are of both kinds."""

    def forward(own: Any, x: Tensor) -> Tensor:
        x = own.norm(x + own.down(F.gelu(own.up(x))))
        return x.mean((0, 1)) * own.norm.weight

    layers = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    graph = graph_of(Calls(forward, **layers), torch.randn(16, 6, 8))
    chosen, left = divided(graph, 2)
    made = sharded(graph, (*chosen, *left), (1, 1)).members[0]
    found = [op for op in made.ops if op.target == "shard.copy_to_group" and op.params]
    copies = {op.params[0]: op.args[1:] for op in found}
    assert copies["norm.weight"] == ("at once",)
    assert copies["norm.bias"] == ()


def test_plans_of_older_versions_gather_for_all(graph: Graph) -> None:
    chosen, left = divided(graph, 2)
    own = sharded(graph, (*chosen, *left), (1, 1), scatters=False).members[0]
    kinds = [op.target for op in own.ops if op.target.startswith("shard.")]
    assert "shard.gather_to_group" not in kinds
    assert kinds.count("shard.all_gather") == 2


def test_a_mean_over_all_positions_is_added_in_parts(graph: Graph) -> None:
    """A member gives its positions' part of the loss: what it is made of is not sent."""
    chosen, (left,) = divided(graph, 2)
    assert targets(graph, left.summed) == ["mean"]
    own = sharded(graph, (*chosen, left), (2, 1)).members[0]
    assert own.loss is not None
    assert own.op[own.loss].target == "shard.all_reduce"
    assert own.op[own.loss].outputs[0].shape == ()
    assert "shard.all_gather" not in [op.target for op in own.ops]


def test_a_sum_as_large_as_its_parts_is_left_whole() -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        made = own.norm(x + own.down(F.gelu(own.up(x))))
        return made.sum(1, keepdim=True) * x  # four positions: 4 times fewer numbers

    layers = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    graph = graph_of(Calls(forward, **layers), torch.randn(4, 4, 8))
    for left in divided(graph, 2)[1]:
        assert "sum" not in targets(graph, left.summed)


@pytest.mark.nightly
@pytest.mark.parametrize("is_read_whole", [False, True])
def test_a_table_of_positions_is_divided_where_only_parts_read_it(is_read_whole: bool) -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        made = block(own, x + own.table)
        return made + own.table.sum() if is_read_whole else made

    calls = Calls(forward, **dict(model().named_children()))
    calls.register_parameter("table", nn.Parameter(torch.randn(LENGTH, DIM)))
    graph = graph_of(calls, torch.randn(16, LENGTH, DIM))
    chosen, (left,) = divided(graph, 2)
    assert [place.name for place in left.params] == ([] if is_read_whole else ["table"])
    rows = [
        s.stop - s.start
        for s in sharded(graph, (*chosen, left), (2, 1)).shards
        if s.param == "table"
    ]
    assert rows == ([] if is_read_whole else [4, 2])
