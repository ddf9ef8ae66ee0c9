"""Dimensions as factors, and rules of large ops that are tried at smaller sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Graph, RuleTrial
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, try_rule
from bigbrain_fx.frontend.tracing.executor import shard_rule_trial
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.plan.shard.factors import (
    Factor,
    UnlikeError,
    cut,
    everything,
    flat,
    fresh,
    join_alone,
    joined,
    leaves,
    reshaped,
    size,
    strides,
    tag,
    unify,
)
from bigbrain_fx.plan.shard.rewrite import lengths
from bigbrain_fx.plan.shard.trials import trials


def sizes(dims: tuple[tuple[Factor, ...], ...]) -> list[list[int]]:
    return [[factor.size for factor in leaves(own)] for own in dims]


def test_a_fused_dimension_is_dealt_out_and_found_again() -> None:
    (rows,) = fresh((384,))
    heads = reshaped((rows,), (3, 4, 32))
    assert sizes(heads) == [[3], [4], [32]]
    assert sizes((rows,)) == [[3, 4, 32]]
    assert sizes(reshaped((heads[1], heads[2]), (128,))) == [[4, 32]]


def test_two_dimensions_become_the_same_factors() -> None:
    (hidden,) = fresh((64,))
    groups, each = fresh((2, 32))
    unify(hidden, (*groups, *each))
    assert list(leaves(hidden)) == list(flat((groups, each)))


def test_an_indivisible_size_is_not_made_equal() -> None:
    with pytest.raises(UnlikeError):
        unify(*fresh((6, 4)))


def test_a_reshape_that_does_not_divide_gives_new_factors_there_only() -> None:
    before = fresh((5, 6, 4))
    assert sizes(before) == [[5], [6], [4]]
    after = reshaped(before, (5, 8, 3))
    assert list(leaves(after[0])) == list(leaves(before[0]))
    assert not {*flat(after[1:])} & {*flat(before)}


@pytest.mark.parametrize(
    ("count", "shares", "want"),
    [(3, (2, 1), (2, 1)), (8, (3, 1), (6, 2)), (4, (100, 1), (3, 1)), (5, (1, 1, 1), (2, 2, 1))],
)
def test_an_axis_is_divided_by_shares(count: int, shares: tuple[int, ...], want: object) -> None:
    assert lengths(count, shares) == want


def test_an_axis_has_a_part_for_every_member() -> None:
    with pytest.raises(InputError, match="axis of 2 cannot be split over 3"):
        lengths(2, (1, 1, 1))
    with pytest.raises(InputError, match="above 0"):
        lengths(2, (1, 0))


def test_unlike_pieces_have_what_is_in_all_of_them() -> None:
    (rows,) = fresh((40,))
    q, k, v = cut(rows, (24, 8, 8))
    groups, _, _ = reshaped((q,), (2, 3, 4))
    unify(groups, reshaped((k,), (2, 4))[0])
    unify(groups, reshaped((v,), (2, 4))[0])
    (group,) = leaves(groups)
    assert list(leaves(rows)) == [rows[0]]
    assert list(everything(rows)) == [rows[0], group]
    assert dict(strides((*rows, Factor(5))))[group] == (60, 20, 20)
    assert dict(strides(rows))[rows[0]] == (1,)
    assert cut(rows, (24, 8, 8)) == (q, k, v)


def test_pieces_are_forgotten_where_a_dimension_is_divided_otherwise() -> None:
    (rows,), (other,), (viewed,) = fresh((40,)), fresh((40,)), fresh((40,))
    pieces = cut(rows, (24, 8, 8))
    assert not cut(rows, (16, 24))
    cut(other, (8, 32))
    unify(rows, other)
    assert [*map(size, next(leaves(other)).pieces)] == [24, 8, 8]
    unify(viewed, (Factor(5), Factor(8)))
    unify(rows, viewed)
    assert sizes((rows, viewed)) == [[5, 8], [5, 8]]
    assert not cut(rows, (24, 8, 8))
    assert not {*everything(rows)} & {*flat(pieces)}


def test_like_pieces_that_are_divided_otherwise_leave_those_of_the_first() -> None:
    (one,), (other,) = fresh((40,)), fresh((40,))
    unify(cut(one, (24, 16))[0], (Factor(6), Factor(4)))
    unify(cut(other, (24, 16))[0], (Factor(8), Factor(3)))
    unify(one, other)
    assert list(leaves(one)) == list(leaves(other))


def test_a_dimension_without_pieces_gets_those_of_its_like() -> None:
    (rows,), (bias,) = fresh((40,)), fresh((40,))
    cut(rows, (32, 8))
    unify(bias, rows)
    assert list(leaves(bias)) == [rows[0]]


def test_equal_runs_in_pieces_are_one_number() -> None:
    heads, each = Factor(3), Factor(4)
    (pair,) = fresh((24,))
    unify(pair, (Factor(2), heads, each))
    (one,) = fresh((12,))
    unify(one, (heads, Factor(4)))
    both = joined((pair, one))
    assert both.size == 36
    assert dict(strides((both,)))[heads.root] == (4,)  # three runs of 3 * 4


def test_a_repeated_tensor_of_a_piece_counts_twice() -> None:
    (square,), (one,) = fresh((9,)), fresh((3,))
    unify(square, (*one, *one))
    both = joined((square, one))
    assert [own for own, _ in strides((both,))].count(one[0].root) == 2


def test_a_piece_that_nothing_divides_goes_with_the_heads_beside_it() -> None:
    (rows,) = fresh((24 + 96,))
    attended, hidden = cut(rows, (24, 96))
    heads, _ = reshaped((attended,), (6, 4))
    assert not dict(strides(rows)).keys() & {*leaves(heads)}
    tag(heads, "heads")
    join_alone(rows[0], "heads")
    (own,) = leaves(heads)
    assert dict(strides(rows))[own] == (4, 16)
    assert next(leaves(hidden)) is own


def test_a_piece_of_one_has_nothing_that_another_has() -> None:
    (tokens,) = fresh((17,))
    _, rest = cut(tokens, (1, 16))
    tag(rest, "heads")
    join_alone(tokens[0], "heads")
    assert list(everything(tokens)) == [*tokens]


# --------------------------------------------------------------------------- smaller sizes


LENGTH, DIM, HEADS, WORDS = 1024, 128, 8, 8000
LARGE = 1 << 22


class Decoder(nn.Module):
    """One block between an embedding and a head of many words; the loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@lru_cache
def graph() -> Graph:
    torch.manual_seed(0)
    return capture(Decoder(), {"words": torch.zeros(2, LENGTH, dtype=torch.int64)}).graph


@lru_cache
def tried() -> tuple[RuleTrial, ...]:
    return trials(graph(), chosen_axes(priced_axes(graph(), axes(graph())), 2), (1.0, 1.0))


def of_head() -> RuleTrial:
    """The trial of the product that makes words."""
    linear = "aten.linear.default"
    return next(t for t in tried() if t.reduced and t.whole.ops[-1].target == linear)


def numbers(each: Graph) -> int:
    concrete = each.at(each.batch)
    specs = [e.spec for e in concrete.inputs] + [p.spec for p in concrete.params]
    return sum(spec.numel for spec in (*specs, *(s for op in concrete.ops for s in op.outputs)))


@pytest.mark.nightly
def test_no_large_trial_is_run_at_its_own_size() -> None:
    large = [trial for trial in tried() if numbers(trial.whole) > LARGE]
    assert large
    for trial in large:
        assert trial.reduced is not None
        ran = shard_rule_trial._at_small_sizes(trial)
        assert numbers(ran.whole) <= LARGE, trial.ops
        assert try_rule(trial) is None


def test_small_trials_are_run_as_they_are() -> None:
    small = [trial for trial in tried() if numbers(trial.whole) <= LARGE]
    assert small
    assert all(trial.reduced is None for trial in small)


def test_the_axis_has_its_own_size() -> None:
    trial = of_head()
    assert trial.reduced is not None
    (words,) = (e for e in trial.reduced[0].params if WORDS in e.spec.shape)
    assert words.spec.shape == (WORDS, 8)


def test_a_wrong_rule_is_caught_at_small_sizes() -> None:
    trial = of_head()
    assert trial.reduced is not None
    whole, sharded = trial.reduced
    ops = [replace(op, args=(*op.args[:-1], op.args[0])) for op in sharded.members[0].ops]
    members = (replace(sharded.members[0], ops=tuple(ops)), *sharded.members[1:])
    assert try_rule(replace(trial, reduced=(whole, replace(sharded, members=members))))


@pytest.mark.parametrize("size", [17, 4096])
def test_sizes_at_which_an_op_does_not_compute_are_not_used(size: int) -> None:
    trial = of_head()
    assert trial.reduced is not None
    whole, sharded = trial.reduced
    wrong = tuple(replace(p, spec=replace(p.spec, shape=(size, 3))) for p in whole.params)
    broken = replace(trial, reduced=(replace(whole, params=wrong), sharded))
    assert shard_rule_trial._at_small_sizes(broken) is broken
