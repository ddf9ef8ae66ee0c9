"""What groups divide, in which shares: found by what their ops take, before anything is planned."""

from __future__ import annotations

import pytest

from bigbrain_fx.core import Axis, Graph, Link
from bigbrain_fx.plan import Options, axes, priced_axes
from bigbrain_fx.plan.tensor.groupings import Grouping
from bigbrain_fx.plan.tensor.weighed import Weigher, chain_s, other_axes, other_shares
from tests.plan.tensor.test_together import SOURCE, cluster, graph, work


def usable(found: Graph) -> tuple[Axis, ...]:
    return priced_axes(found, (axis for axis in axes(found) if axis.flops and axis.params))


def test_shares_are_of_the_speeds_where_nothing_is_sent_to_speak_of() -> None:
    found = work(graph())
    where = cluster(3, 1, link=Link(1e-9, 1e12))
    weigher = Weigher(found, where, SOURCE, Options("naive", micro_batches=1), usable(found), 200)
    starts = [(axis,) for axis in usable(found)]
    best = weigher.best(Grouping((("d0", "d1"),), (1, 1)), starts, 100)
    assert best.grouping.shares[0] / best.grouping.shares[1] == pytest.approx(3, rel=0.2)
    assert weigher.left < 200


def test_with_no_looks_left_the_start_is_the_answer() -> None:
    found = work(graph())
    options = Options("naive", micro_batches=1)
    weigher = Weigher(found, cluster(3, 1), SOURCE, options, usable(found), 0)
    grouping = Grouping((("d0", "d1"),), (1, 1))
    best = weigher.best(grouping, [usable(found)[:1]], 0)
    assert (best.grouping, best.axes) == (grouping, usable(found)[:1])
    assert 0 < best.least_s <= best.about_s


def test_other_shares_are_near_and_in_smallest_numbers() -> None:
    found = set(other_shares((1, 1, 1)))
    assert {(3, 4, 3), (4, 3, 4), (2, 1, 1), (2, 2, 1)} <= found
    assert (1, 1, 1) not in found
    assert (2, 2, 2) not in found


def test_other_axes_leave_one_out_or_take_another() -> None:
    every = usable(graph())
    (first, *rest) = every
    found = list(other_axes((first,), every, 2))
    assert all(set(some) != {first} for some in found)
    assert any(first not in some for some in found)
    assert len(set(found)) == len(found)
    assert rest


def test_a_chain_takes_no_group_that_only_fills_later() -> None:
    assert chain_s([2.0, 1.0], None) == pytest.approx(1 / 3)
    assert chain_s([1.0, 2.0], 1) == pytest.approx(0.5)  # one micro-batch: the faster one alone
    assert chain_s([1.0, 1.0], 4) == pytest.approx(1.25 / 2)
