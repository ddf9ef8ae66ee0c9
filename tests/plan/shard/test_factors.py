"""Dimensions as factors: made the same, dealt out to new sizes."""

from __future__ import annotations

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.shard.factors import (
    Factor,
    UnlikeError,
    flat,
    fresh,
    leaves,
    reshaped,
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


def test_what_does_not_divide_is_not_made_the_same() -> None:
    with pytest.raises(UnlikeError):
        unify(*fresh((6, 4)))


def test_a_reshape_that_does_not_divide_gives_new_factors_there_only() -> None:
    before = fresh((5, 6, 4))
    assert sizes(before) == [[5], [6], [4]]
    after = reshaped(before, (5, 8, 3))
    assert list(leaves(after[0])) == list(leaves(before[0]))
    assert not {*flat(after[1:])} & {*flat(before)}


@pytest.mark.parametrize(
    ("size", "shares", "want"),
    [(3, (2, 1), (2, 1)), (8, (3, 1), (6, 2)), (4, (100, 1), (3, 1)), (5, (1, 1, 1), (2, 2, 1))],
)
def test_an_axis_is_divided_by_shares(size: int, shares: tuple[int, ...], want: object) -> None:
    assert lengths(size, shares) == want


def test_an_axis_has_a_part_for_every_member() -> None:
    with pytest.raises(InputError, match="axis of 2 cannot be split over 3"):
        lengths(2, (1, 1, 1))
    with pytest.raises(InputError, match="above 0"):
        lengths(2, (1, 0))
