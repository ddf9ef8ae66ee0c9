"""Unlike pieces of one matrix that stand one after another: each member has its part of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bigbrain_fx.core import Inner, Shard
from bigbrain_fx.frontend import Captured, capture, taken
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.plan.shard import between
from bigbrain_fx.runtime import joined, part_of_whole
from bigbrain_fx.verification.sharding import agree, tried_axes
from bigbrain_fx.weights import Stored, cut_file, read_header, whole_tensors

DIM, HEADS, GROUPS, EACH, HIDDEN = 24, 6, 3, 4, 36
QUERIES, KEYS = HEADS * EACH, GROUPS * EACH


class Block(nn.Module):
    """Grouped-query attention whose queries, keys and values are rows of one matrix.

    As in phi3, what a rotary embedding would not turn is an empty rest.
    """

    def __init__(self, cut: Callable[[nn.Linear, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.norm, self.cut = nn.LayerNorm(DIM), cut
        self.qkv, self.out = nn.Linear(DIM, QUERIES + 2 * KEYS), nn.Linear(QUERIES, DIM)

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
        self.norm, self.into = nn.LayerNorm(DIM), nn.Linear(DIM, QUERIES + 2 * KEYS + HIDDEN)
        self.out = nn.Linear(QUERIES + HIDDEN, DIM)

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
    return capture(module, {"input": torch.randn(4, 5, DIM)}, lambda y, _: y.square().mean())


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
