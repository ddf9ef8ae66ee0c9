"""Who computes which micro-batches: shares as asked or by speed; numbers for each order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster, Stages, SumOrder, ZeroStage
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import left_out_text
from bigbrain_fx.plan.replicas.divide import asked, by_speed, numbered
from bigbrain_fx.plan.schedule import nodes, parts
from tests.support.bundles import cluster


def test_shares_are_exact_or_refused() -> None:
    assert asked(8, (3, 1), 32) == (6, 2)
    with pytest.raises(InputError, match="8 micro-batches cannot be shared 3:2") as caught:
        asked(8, (3, 2), 40)
    assert caught.value.help == "--micro-batches 10"
    assert asked(10, (3, 2), 40) == (6, 4)
    with pytest.raises(InputError, match="8 micro-batches") as caught:
        asked(8, (2, 1), 64)  # 3 divides no divisor of 64
    assert "use shares whose sum divides 64" in (caught.value.help or "")


def done_s(counts: tuple[int, ...], replicas: list[tuple[int, int]]) -> float:
    """Return when the last of replicas is done, each of a speed and a start."""
    return max(start + n / v for n, (v, start) in zip(counts, replicas, strict=True))


def best_by_trying(count: int, replicas: list[tuple[int, int]]) -> float:
    """Return the least time that any shares give, each replica having one at least."""
    ways = itertools.product(range(1, count + 1), repeat=len(replicas))
    return min(done_s(way, replicas) for way in ways if sum(way) == count)


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_by_speed_is_the_best_there_is(more: int, replicas: list[tuple[int, int]]) -> None:
    count = len(replicas) + more
    speeds, starts = map(list, zip(*replicas, strict=True))
    found = by_speed(count, speeds, starts)
    assert sum(found) == count
    assert done_s(found, replicas) == pytest.approx(best_by_trying(count, replicas))
    assert by_speed(count, speeds) == by_speed(count, speeds, [0] * len(speeds))


@given(
    st.booleans(),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_each_number_is_somebodys_once(in_turn: bool, counts: list[int]) -> None:
    found = numbered(counts, in_turn=in_turn)
    assert [len(own) for own in found] == counts
    assert all(list(own) == sorted(own) for own in found)
    assert sorted(itertools.chain(*found)) == list(range(sum(counts)))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_nodes_of_a_tree_cover_their_leaves(micros: set[int]) -> None:
    found = nodes(sorted(micros))
    covered = [micro for first, size in found for micro in range(first, first + size)]
    assert covered == sorted(micros)
    assert all(first % size == 0 for first, size in found)


def test_parts_of_each_order() -> None:
    def sent(order: SumOrder, micros: tuple[int, ...], zero: ZeroStage = 0) -> object:
        return parts(Stages((), (), (), (micros,), zero_stage=zero, sum_order=order), 0)

    assert sent("replica", (0, 1, 2)) == (None,)
    assert sent("micro", (0, 2)) == (0, 2)
    assert sent("tree", (0, 1, 2, 3, 4, 6, 7)) == (0, 4, 6)
    assert sent("tree", (1, 2)) == (1, 2)  # neighbours, but no siblings
    assert sent("tree", (0, 1, 2, 3), zero=2) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ((), ""),
        ((("d0",), ("d1",), ("d2",)), ""),
        ((("d0",), ("d2",)), "not used, as no replica of the cluster file names them: d1"),
    ],
)
def test_a_device_in_no_replica_is_named(replicas: tuple[tuple[str, ...], ...], said: str) -> None:
    whole = cluster(3)
    found = Cluster(whole.devices, whole.default_link, replicas=replicas)
    assert left_out_text(found) == said
