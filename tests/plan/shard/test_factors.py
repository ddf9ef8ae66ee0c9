"""Dimensions as factors: made the same, dealt out to new sizes."""

from __future__ import annotations

import pytest

from bigbrain_fx.errors import InputError
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
