"""Layers that make one axis of another, and unlike pieces of one matrix: divided, and equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Graph, Inner, Shard
from bigbrain_fx.frontend import Captured, capture, taken
from bigbrain_fx.plan import axes, chosen_axes, priced_axes, sharded
from bigbrain_fx.plan.shard import between
from bigbrain_fx.plan.shard.trials import trials
from bigbrain_fx.runtime import joined, part_of_whole
from bigbrain_fx.verification.sharding import agree, tried_axes
from bigbrain_fx.weights import Stored, cut_file, read_header, whole_tensors

ROWS, DIM = 3, 12
SHARES = ((2.0, 1.0), (2.0, 1.0, 1.0))


class Residual(nn.Module):
    """Two blocks that add what they make of their input to it."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.square = nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM) / 4)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.scores = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.call(self, x + self.call(self, x))).pow(2).mean()


def picked(own: Any, x: Tensor) -> Tensor:
    """Weights of an expert that each row chooses."""
    return torch.bmm(x.unsqueeze(1), own.experts[x.argmax(-1) % 4]).squeeze(1)


def by_row(own: Any, x: Tensor) -> Tensor:
    """Stochastic depth: a row's block is left out as a whole."""
    kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
    return own.square(x) * kept.div_(0.5)


def convolved(own: Any, x: Tensor) -> Tensor:
    return own.conv(x.unsqueeze(-1).repeat(1, 1, 4)).mean(-1)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "linear": (lambda own, x: own.square(x), "square.weight"),
    "picked": (picked, "experts"),
    "by row": (by_row, "square.weight"),
    "conv": (convolved, "conv.weight"),
}


def captured_of(call: Callable[[Any, Tensor], Tensor]) -> Captured:
    torch.manual_seed(1)
    return capture(Residual(call), {"x": torch.randn(ROWS, DIM)})


def with_param(graph: Graph, name: str) -> list[Axis]:
    every = priced_axes(graph, axes(graph))
    return [axis for axis in every if name in {place.name for place in axis.params}]


@pytest.mark.gate("conv-shares1", "linear-shares1")
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_a_square_layer_is_divided_and_gathered(name: str, shares: tuple[float, ...]) -> None:
    call, param = CASES[name]
    captured = captured_of(call)
    given = chosen_axes(with_param(captured.graph, param), len(shares))
    chosen, whole = tried_axes(captured.graph, given, shares)
    assert chosen, "the layer has no axis of its own"
    assert not whole
    found = agree(captured, chosen, shares, rows=ROWS, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12


@pytest.mark.gate("linear-shares1", "picked-shares0")
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_square_layer_are_made_of_its_whole_input(
    name: str, shares: tuple[float, ...]
) -> None:
    """So what comes before and after it is divided, too, and its result is no more gathered."""
    call, param = CASES[name]
    captured = captured_of(call)
    (axis,) = (axis for axis in with_param(captured.graph, param) if axis.gathered)
    made = [op for op, _ in axis.gathered]
    assert {*made} <= {*axis.along}
    chosen, whole = tried_axes(captured.graph, [axis], shares)
    assert not whole
    found = agree(captured, chosen, shares, rows=ROWS, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12
    member = sharded(captured.graph, chosen, shares).members[0]
    assert all(member.op[op].outputs[0] != captured.graph.op[op].outputs[0] for op in made)


def between_writes(own: Any, x: Tensor) -> Tensor:
    """Read what is written into after something has gathered it: that copy is not what it is."""
    h = x * 2.0
    largest = h.amax(-1, keepdim=True).detach()
    h.mul_(3.0)
    return own.square(h) + largest


def added_to(own: Any, x: Tensor) -> Tensor:
    """Add a product to a value that has the axis: that one is read as a part."""
    return torch.addmm(x.cos(), x, own.experts[0])


@pytest.mark.parametrize("call", [between_writes, added_to])
def test_a_square_layer_reads_what_is_there(call: Callable[[Any, Tensor], Tensor]) -> None:
    captured = captured_of(call)
    name = "experts" if call is added_to else "square.weight"
    for axis in with_param(captured.graph, name):
        chosen, _ = tried_axes(captured.graph, [axis], SHARES[0])
        found = agree(captured, chosen, SHARES[0], rows=ROWS, exact=True)
        assert max(found.loss, found.gradients) < 1e-12


def test_the_gather_of_a_squares_result_is_in_its_price() -> None:
    captured = captured_of(lambda own, x: own.square(x))
    (axis,) = (a for a in with_param(captured.graph, "square.weight") if not a.gathered and a.along)
    kinds = {exchange.kind for exchange in axis.exchanges if not exchange.backward}
    assert kinds & {"all_gather", "gather_to_group"}


def test_a_square_result_that_is_written_into_stays_whole() -> None:
    """Who reads it after that reads what was written, and a gathered copy would be lost."""
    captured = captured_of(lambda own, x: own.square(x).mul_(2.0))
    for axis in with_param(captured.graph, "square.weight"):
        chosen, _ = tried_axes(captured.graph, [axis], SHARES[0])
        found = agree(captured, chosen, SHARES[0], rows=ROWS, exact=True)
        assert max(found.loss, found.gradients) < 1e-12


def test_a_tensor_of_anothers_kind_does_not_gather_it() -> None:
    def call(own: Any, x: Tensor) -> Tensor:
        h = own.scores(x)
        kept = h.new_empty((h.shape[0], 1)).bernoulli_(0.5)
        return (h * kept)[:, :DIM]

    captured = captured_of(call)
    (axis,) = chosen_axes(with_param(captured.graph, "scores.weight"), 2)
    member = sharded(captured.graph, [axis], SHARES[0]).members[0]
    read = next(op.refs[0] for op in member.ops if op.target.startswith("aten.new_empty"))
    assert not member.op[read].target.startswith("shard.")


def by_heads(own: Any, x: Tensor) -> Tensor:
    """Write into what lies head by head, of which a member's part is a view."""
    heads = own.scores(x).unflatten(-1, (4, 6)).transpose(0, 1).contiguous()
    heads *= torch.arange(1.0, 7.0)
    return own.down(heads[..., :4].transpose(0, 1).flatten(1))


@pytest.mark.nightly
def test_writes_into_a_part_have_a_rule_that_can_be_tried() -> None:
    """A trial writes into a copy: a part that lies by itself is a view, which autograd refuses."""
    captured = captured_of(by_heads)
    given = [a for a in with_param(captured.graph, "scores.weight") if a.size == 4]
    for trial in trials(captured.graph, given, SHARES[0]):
        for op in trial.sharded.members[1].ops:
            made = [trial.sharded.members[1].op.get(name) for name in op.refs if op.mutates]
            assert not [one for one in made if one and one.target.startswith("shard.")]
    chosen, whole = tried_axes(captured.graph, given, SHARES[0])
    assert chosen, "the heads have no axis"
    assert not whole
    found = agree(captured, chosen, SHARES[0], rows=ROWS, exact=True)
    assert max(found.loss, found.gradients) < 1e-12


# --------------------------------------------------------------------------- unlike pieces


MODEL_DIM, QUERY_HEADS, GROUPS, EACH, HIDDEN = 24, 6, 3, 4, 36
QUERIES, KEYS = QUERY_HEADS * EACH, GROUPS * EACH


class Block(nn.Module):
    """Grouped-query attention whose queries, keys and values are rows of one matrix.

    As in phi3, what a rotary embedding would not turn is an empty rest.
    """

    def __init__(self, cut: Callable[[nn.Linear, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.norm, self.cut = nn.LayerNorm(MODEL_DIM), cut
        self.qkv, self.out = nn.Linear(MODEL_DIM, QUERIES + 2 * KEYS), nn.Linear(QUERIES, MODEL_DIM)

    def forward(self, input: Tensor) -> Tensor:
        attended: Tensor = self.out(attended_by(*self.cut(self.qkv, self.norm(input))))
        return input + attended


def attended_by(*parts: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, EACH)).transpose(1, 2) for part in parts)
    q, k = (torch.cat((part[..., :EACH], part[..., EACH:]), -1) for part in (q, k))  # no rest
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


class Parallel(nn.Module):
    """An MLP beside the attention: one matrix before them, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = (
            nn.LayerNorm(MODEL_DIM),
            nn.Linear(MODEL_DIM, QUERIES + 2 * KEYS + HIDDEN),
        )
        self.out = nn.Linear(QUERIES + HIDDEN, MODEL_DIM)

    def forward(self, input: Tensor) -> Tensor:
        *parts, hidden = self.into(self.norm(input)).split((QUERIES, KEYS, KEYS, HIDDEN), -1)
        made: Tensor = self.out(torch.cat((attended_by(*parts), F.gelu(hidden)), -1))
        return input + made


def by_split(qkv: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    return qkv(x).split((QUERIES, KEYS, KEYS), -1)


def by_slices(qkv: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    made = qkv(x)
    return made[..., :QUERIES], made[..., QUERIES:-KEYS], made[..., -KEYS:]


def by_narrow(qkv: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    made, sizes = qkv(x), (QUERIES, KEYS, KEYS)
    return tuple(made.narrow(-1, sum(sizes[:i]), n) for i, n in enumerate(sizes))


def by_two_cuts(qkv: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    q, kv = qkv(x).tensor_split((QUERIES - 4,), -1)
    return torch.cat((q, kv[..., :4]), -1), *kv[..., 4:].chunk(2, -1)


def by_rows(qkv: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    cuts = (slice(QUERIES), slice(QUERIES, QUERIES + KEYS), slice(QUERIES + KEYS, None))
    return tuple(F.linear(x, qkv.weight[cut], qkv.bias[cut]) for cut in cuts)


def captured(module: nn.Module) -> Captured:
    torch.manual_seed(0)
    return capture(module, {"input": torch.randn(4, 5, MODEL_DIM)}, lambda y, _: y.square().mean())


@pytest.mark.gate("by_split-shares1")
@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("cut", [by_split, by_slices, by_narrow, by_rows])
def test_grouped_queries_in_one_matrix_are_divided_by_heads(
    cut: Callable[[nn.Linear, Tensor], tuple[Tensor, ...]], shares: tuple[int, ...]
) -> None:
    require_by_heads(captured(Block(cut)), shares, "out.weight")


@pytest.mark.nightly
@pytest.mark.parametrize("shares", [(1, 1), (2, 1)])
def test_an_mlp_beside_attention_is_divided_with_its_heads(shares: tuple[int, ...]) -> None:
    require_by_heads(captured(Parallel()), shares, "into.weight")


def require_by_heads(found: Captured, shares: tuple[int, ...], matrix: str) -> None:
    priced = priced_axes(found.graph, axes(found.graph))
    chosen, dropped = tried_axes(found.graph, chosen_axes(priced, len(shares)), shares)
    assert [(axis.kind, axis.size) for axis in chosen] == [("heads", GROUPS)]
    assert matrix in {place.name for place in chosen[0].params}
    assert not dropped
    for apart in ((), between(found.graph, priced, chosen)):
        result = agree(found, [*chosen, *apart], shares, exact=True)
        assert max(result.loss, result.gradients, result.buffers) <= 1e-12
        if not apart:
            assert result.exchanges == {"all_reduce": 1, "copy_to_group": 1}  # and no gather


@pytest.mark.nightly
def test_pieces_cut_where_no_head_ends_are_right() -> None:
    found = captured(Block(by_two_cuts))
    priced = priced_axes(found.graph, axes(found.graph))
    chosen, _ = tried_axes(found.graph, chosen_axes(priced, 2), (2, 1))
    result = agree(found, chosen, (2, 1), exact=True)
    assert max(result.loss, result.gradients, result.buffers) <= 1e-12


@pytest.mark.parametrize("inner", [4, (4,), (12, 4, 4), (1, 2)])
def test_parts_are_put_together_again(inner: Inner, tmp_path: Path) -> None:
    """In memory, and in files, where they are runs of bytes."""
    wide = inner if isinstance(inner, int) else sum(inner)
    whole = torch.arange(2 * 2 * 3 * wide * 5, dtype=torch.float32).view(2, 2 * 3 * wide, 5)
    ends, lengths = (0, 2, 3), (2, 1)
    shards = [Shard("w", m, 1, 3, inner, ends[m], ends[m + 1]) for m in range(2)]
    parts = [part_of_whole(whole, 1, inner, lengths, m) for m in range(2)]
    assert torch.equal(joined(parts, 1, inner, lengths), whole)
    found: dict[str, Stored] = {}
    for part, shard in zip(parts, shards, strict=True):
        assert torch.equal(taken(whole, shard), part)
        path = tmp_path / f"{shard.member}.safetensors"
        save_file({"w": whole}, path)
        cut_file(path, [shard])
        assert torch.equal(load_file(path)[f"w[{shard.member}]"], part)
        found |= read_header(path)
    scratch = tmp_path / "whole.safetensors"
    whole_tensors(found, shards, {"w": tuple(whole.shape)}, scratch)
    assert torch.equal(load_file(scratch)["w"], whole)
