"""The walk: deltas against full simulations, memory against the rule, and what it promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Link, Ref
from bigbrain_fx.planning.unit_work import work
from partitioners.chain_dp import ChainDP
from partitioners.delta_clock import DeltaClock, Timing
from partitioners.evaluate import Evaluator
from partitioners.mcmc import MCMC
from partitioners.walk import coarse, improve
from tests.support.examples import quick
from tests.support.placements import case, drawn_homes, simulated_s, unlike
from tests.support.synthetic import (
    chain_graph,
    cluster_of,
    device,
    graph_of,
    op,
    random_costs,
    tensor,
)

seeds = st.integers(0, 10_000)


@quick(40)
@given(seed=seeds, count=st.integers(1, 30), devices=st.integers(1, 4), handling=st.booleans())
def test_a_delta_equals_a_full_simulation(
    seed: int, count: int, devices: int, handling: bool
) -> None:
    cluster, dice = unlike(seed, devices, handling=handling), random.Random(seed)
    graph, costs = case(seed, count, cluster)
    timing = Timing(work(graph, costs), cluster, 4)
    units = len(timing.known.groups)
    clock = DeltaClock(timing, drawn_homes(seed, units, devices))
    for _ in range(15):
        for _ in range(dice.randint(1, 3)):
            clock.move(dice.randrange(units), dice.randrange(devices))
        full = DeltaClock(timing, clock.homes)
        assert clock.alone() == full.alone()
        assert clock.most() == full.most()
        assert clock.cost() == full.cost()
        assert clock.device_ticks == full.device_ticks


def test_only_what_comes_after_a_move_is_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, graph = unlike(1, 3), chain_graph(1, 49, skips=False)
    timing = Timing(work(graph, random_costs(1, graph, cluster)), cluster, 4)
    clock = DeltaClock(timing, [0] * 49)
    clock.cost()
    seen: list[int] = []
    run = DeltaClock._run_units

    def counted(
        self: DeltaClock, first: int, after: int, free: list[int], wires: list[int]
    ) -> None:
        seen.extend(range(first, after))
        run(self, first, after, free, wires)

    monkeypatch.setattr(DeltaClock, "_run_units", counted)
    clock.move(40, 1)  # unit 39 sends now; the last checkpoint before it is 35
    clock.cost()
    assert seen == list(range(35, 49))
    clock.cost()
    assert len(seen) == 14


@quick(12)
@given(seed=seeds, count=st.integers(2, 25), devices=st.integers(1, 3))
def test_is_never_worse_than_its_start(seed: int, count: int, devices: int) -> None:
    cluster = unlike(seed, devices)
    graph, costs = case(seed, count, cluster)
    evaluator = Evaluator(graph, cluster, costs, 4)
    start = tuple(drawn_homes(seed, len(evaluator.known.groups), devices))
    found = improve(evaluator, start, 120, seed, walks=2)
    assert evaluator.step_s(found) <= evaluator.step_s(start)
    assert evaluator.fits(found)
    assert improve(evaluator, start, 120, seed, walks=2) == found


def test_two_towers_that_chain_dp_cannot_part() -> None:
    """Two branches with a shared end on each device: no contiguous split of three balances them."""
    ops = [op("a0", "aten.relu.default"), op("b0", "aten.relu.default")]
    ops += [
        op(f"{tower}{i}", "aten.relu.default", Ref(f"{tower}{i - 1}"), out=tensor(4, 4))
        for i in range(1, 6)
        for tower in "ab"
    ]
    ops.append(op("loss", "aten.add.Tensor", Ref("a5"), Ref("b5"), out=tensor(1)))
    graph = graph_of(ops)
    cluster = cluster_of(device("d0"), device("d1"), link=Link(1e-5, 1e8))
    costs = random_costs(3, graph, cluster)
    chain_s = simulated_s(graph, costs, ChainDP(2).partition(graph, cluster, costs), 2)
    walk_s = simulated_s(graph, costs, MCMC(2, proposals=800).partition(graph, cluster, costs), 2)
    assert walk_s < chain_s


@pytest.mark.nightly
def test_what_the_walk_gains_the_simulator_confirms() -> None:
    """Irregular graphs on three devices; on the chains of real models chain-dp leaves little."""
    ratios = []
    for seed in range(5):
        cluster = unlike(seed, 3)
        graph, costs = case(seed, 25, cluster)
        walk = MCMC(8, proposals=400).partition(graph, cluster, costs)
        chain = ChainDP(8).partition(graph, cluster, costs)
        walk_s = simulated_s(graph, costs, walk, 8)
        ratios.append(walk_s / simulated_s(graph, costs, chain, 8))
    assert max(ratios) < 1.02
    assert sum(ratios) / len(ratios) < 0.95


def test_the_budget_is_in_proposals() -> None:
    cluster = unlike(5, 3)
    graph, costs = case(5, 20, cluster)
    nothing = MCMC(4, proposals=0).partition(graph, cluster, costs)
    assert nothing.device_of == ChainDP(4).partition(graph, cluster, costs).device_of
    more = MCMC(4, proposals=400).partition(graph, cluster, costs)
    assert "400 proposals" in more.reason


def test_runs_have_one_home() -> None:
    cluster = unlike(2, 3)
    graph, costs = case(2, 40, cluster)
    known = work(graph, costs)
    homes = drawn_homes(1, len(known.groups), 3)
    runs, merged = coarse(known, homes, most=5)
    assert [unit for run in runs for unit in run] == list(range(len(homes)))
    assert all(len({homes[unit] for unit in run}) == 1 for run in runs)
    assert len(merged.groups) == len(runs)
