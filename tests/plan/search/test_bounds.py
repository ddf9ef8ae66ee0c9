"""Bounds below which no plan of `auto` is, and the parts of its search."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster, Graph, Link, Placement
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import (
    Options,
    costs_of,
    plan_placed as placed_plan,
)
from bigbrain_fx.plan.judge import Judge
from bigbrain_fx.plan.search.candidates import splits
from bigbrain_fx.plan.search.pipeline_search import bound_of_all
from bigbrain_fx.planning import estimator, partitioner
from bigbrain_fx.planning.chain import Line
from bigbrain_fx.planning.cutter import Cutter, range_minima
from bigbrain_fx.planning.pace import chain_of, falling, step_s
from bigbrain_fx.planning.piece_memory import Setting
from bigbrain_fx.planning.unit_work import Work, work
from tests.support.messages import refused
from tests.support.rough import device_orders
from tests.support.search_cases import SOURCE, auto, case, equal, even_chain, quick, seeds

# --------------------------------------------------------------------------- bounds


def test_a_refusal_that_nobody_reads_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_for(*about: object, most: float) -> None:
        raise AssertionError("the nearest split was looked for")

    monkeypatch.setattr("partitioners.chain_dp.nearest", looked_for)
    graph, cluster = case(3, 6, 2, 1)
    costs = estimator("analytical").estimate(graph.at(8), cluster)
    with pytest.raises(NoPlanError) as caught:
        partitioner("chain-dp", micro_batches=4).partition(graph.at(8), cluster, costs)
    with pytest.raises(AssertionError, match="was looked for"):
        str(caught.value)


def test_one_device_is_asked_of_one_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def place(judge: Judge, name: str, micro_batches: int) -> Placement:
        asked.append(name)
        raise NoPlanError(f"{name} refuses")

    monkeypatch.setattr(Judge, "place", place)
    monkeypatch.setattr("bigbrain_fx.plan.making.require_enough", lambda *_about: None)
    graph, cluster = case(3, 6, 1, 1)
    with pytest.raises(NoPlanError, match="naive refuses"):
        auto(graph, cluster)
    assert set(asked) == {"naive"}


def test_the_rule_that_stops_every_plan_is_named() -> None:
    graph, cluster = even_chain(8), equal(3, Link(1e-5, 1e9))
    with refused("BX1107"):
        auto(graph, cluster, schedule="dualpipe-v", micro_batches=2)


@pytest.mark.nightly
@quick
@given(
    seed=seeds, count=st.integers(1, 7), devices=st.integers(1, 3), micro=st.sampled_from([1, 4])
)
def test_no_split_of_an_order_is_below_the_bound(
    seed: int, count: int, devices: int, micro: int
) -> None:
    """Simulate every contiguous split of the given order, on every sequence of devices."""
    graph, cluster = case(seed, count, devices)
    found = work_of(graph, cluster, micro)
    least_s = bound_of_all(found, cluster, micro)
    for sequence in device_orders(cluster, 100):
        for inner in combinations(range(1, found.count), len(sequence) - 1):
            sizes = np.diff([0, *inner, found.count])
            homes = [d for d, n in zip(sequence, sizes, strict=False) for _ in range(n)]
            if len(homes) != found.count:
                continue
            placement = Placement(found.placed(homes))
            for in_flight in (None, (micro,) * len(set(homes))):
                options = Options("naive", micro_batches=micro, in_flight=in_flight)
                plan = placed_plan(graph, cluster, SOURCE, options, placement)
                assert least_s <= plan.forecast.step_s * (1 + 1e-9)


def test_the_bound_of_an_even_chain_is_nearly_reached() -> None:
    plan = auto(even_chain(64), equal(4, Link(1e-6, 1e10)))
    assert plan.search is not None
    assert "that divides no op, of one replica" in plan.search.bounds[0].covers
    assert 0 <= plan.search.gaps[0] < 0.08


def work_of(graph: Graph, cluster: Cluster, micro: int) -> Work:
    placement = Placement({op.name: cluster.devices[0].name for op in graph.ops})
    options = Options("naive", micro_batches=micro)
    costs = costs_of(placed_plan(graph, cluster, SOURCE, options, placement))
    return work(graph.at(graph.batch // micro), costs)


# --------------------------------------------------------------------------- parts


@quick
@given(
    values=st.lists(st.sampled_from([1.0, 2.0, 3.0, float("inf")]), min_size=1, max_size=20),
    seed=seeds,
)
def test_the_first_minimum_of_every_range(values: list[float], seed: int) -> None:
    dice = np.random.default_rng(seed)
    count = len(values)
    firsts, lasts = dice.integers(0, count + 1, 15), dice.integers(0, count, 15)
    found = range_minima(np.array(values), firsts, lasts)
    for first, last, least in zip(firsts, lasts, found, strict=True):
        assert least == min(values[first : last + 1], default=float("inf"))


@quick
@given(seed=seeds, count=st.integers(1, 7), devices=st.integers(1, 3))
def test_the_best_split_is_the_best_of_all(seed: int, count: int, devices: int) -> None:
    graph, cluster = case(seed, count, devices)
    found = work_of(graph, cluster, 4)
    line, setting = Line(found, range(found.count), 100), Setting(cluster, 4)
    cutter = Cutter(line, setting)
    sequences = device_orders(cluster, 100)
    ranked, _ = splits(line, setting, sequences, 1_000_000)
    best_s = min(split.step_s(4) for split in ranked)
    for sequence in sequences:
        for inner in combinations(range(1, found.count), len(sequence) - 1):
            cuts = (0, *inner, found.count)
            if len(cuts) == len(sequence) + 1:
                assert best_s <= cutter.measure(sequence, cuts).step_s(4) * (1 + 2e-3)


@quick
@given(seed=seeds, count=st.integers(2, 9), micro=st.sampled_from([1, 2, 4]))
def test_the_pace_of_a_chain_is_the_simulators(seed: int, count: int, micro: int) -> None:
    """Values that are read further on go straight there: nothing is simplified."""
    graph, cluster = case(2 * seed, count, 3)
    found = work_of(graph, cluster, micro)
    line, setting = Line(found, range(found.count), 100), Setting(cluster, micro)
    ranked, _ = splits(line, setting, device_orders(cluster, 20), 300)
    for split in ranked[:6]:
        in_flight = falling((3, 2, 2), micro, (9, 9, 9))[: len(split.sequence)]
        paced_s = step_s(chain_of(line, split, setting, ()), micro, in_flight)
        options = Options("naive", micro_batches=micro, in_flight=in_flight)
        placement = Placement(found.placed(line.homes(split)))
        plan = placed_plan(graph, cluster, SOURCE, options, placement)
        assert paced_s == pytest.approx(plan.forecast.step_s, rel=1e-9)


def test_numbers_in_flight_never_grow_along_the_chain() -> None:
    assert falling((5, 9, 2), 8, (4, 9, 9)) == (4, 4, 2)
    assert falling((5, 4, 3), 2, (9, 9, 9)) == (2, 2, 2)
    assert falling((5, 4), 8, (0, 9)) == (1, 1)


def test_few_places_to_cut_are_those_where_little_crosses() -> None:
    graph, cluster = even_chain(40), equal(2, Link(1e-6, 1e10))
    found = work_of(graph, cluster, 1)
    line = Line(found, range(found.count), 10)
    assert line.count <= 11
    assert line.places[0] == 0
    assert line.places[-1] == found.count
