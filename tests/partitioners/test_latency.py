"""One micro-batch alone: HEFT, and a portfolio that is never behind what it is made of."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.core import Link, Placement, Ref
from bigbrain_fx.errors import InputError
from partitioners.heft import heft, upward_ranks
from partitioners.jobs import Jobs
from partitioners.judge import Judge
from partitioners.latency import Latency
from partitioners.m_etf import METF
from partitioners.m_sct import MSCT
from tests.support.examples import examples
from tests.support.placements import case, simulated_s, unlike
from tests.support.synthetic import cluster_of, device, graph_of, op, random_costs, tensor

quick = settings(
    max_examples=examples(8),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)


class Endless:
    """Room for everything."""

    def fits(self, job: int, device: int) -> bool:
        return True

    def take(self, job: int, device: int) -> None:
        pass


class Full(Endless):
    """Room for nothing."""

    def fits(self, job: int, device: int) -> bool:
        return False


def fork(move: float) -> Jobs:
    """One job of 1 s feeds two of 4 s; both feed one of 1 s. Two equal devices."""
    after = ((), (0,), (0,), (1, 2))
    return Jobs(
        np.array([[1.0, 4.0, 4.0, 1.0]] * 2),
        after,
        (0, 1, 2),
        ((), (0,), (0,), (1, 2)),
        lambda value, a, b: move,
    )


def test_ranks_are_the_longest_ways_to_the_end() -> None:
    assert upward_ranks(fork(0.5)).tolist() == [7.0, 5.5, 5.5, 1.0]


def test_heft_runs_branches_side_by_side_when_moving_is_cheap() -> None:
    homes = heft(fork(0.5), Endless())
    assert homes[1] != homes[2]


def test_heft_stays_when_moving_is_dear() -> None:
    assert len(set(heft(fork(10.0), Endless()))) == 1


def test_heft_fills_gaps() -> None:
    """Device 1 waits for a value until 3; a job without inputs fits before it."""
    times = np.array([[2.0, 9.0, 9.0], [9.0, 3.0, 1.0]])
    jobs = Jobs(times, ((), (0,), ()), (0,), ((), (0,), ()), lambda value, a, b: 1.0)
    assert heft(jobs, Endless()) == (0, 1, 1)


def test_heft_says_what_fits_nowhere() -> None:
    assert heft(fork(1.0), Full()) == (-1,) * 4


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 25), devices=st.integers(1, 3))
def test_is_never_behind_its_parts(seed: int, count: int, devices: int) -> None:
    cluster = unlike(seed, devices)
    graph, costs = case(seed, count, cluster)
    judge = Judge(graph, cluster, costs, 1)
    found = judge.homes(Latency(proposals=90).partition(graph, cluster, costs))
    units = len(judge.known.groups)
    parts = [METF(1).partition(graph, cluster, costs), MSCT(1).partition(graph, cluster, costs)]
    every = [judge.homes(part) for part in parts]
    every += [(number,) * units for number in range(devices)]
    assert all(judge.step_s(found) <= judge.step_s(homes) * (1 + 1e-12) for homes in every)


def test_a_chain_that_fits_stays_on_the_fastest_device() -> None:
    ops = [op("v0", "aten.relu.default")]
    ops += [op(f"v{i}", "aten.relu.default", Ref(f"v{i - 1}")) for i in range(1, 8)]
    graph = graph_of(ops)
    cluster = cluster_of(device("d0"), device("d1", speed=2.0), link=Link(1e-3, 1e6))
    costs = random_costs(1, graph, cluster)
    each_s = {
        d: simulated_s(graph, costs, Placement({entry.name: d for entry in ops}), 1)
        for d in ("d0", "d1")
    }
    found = Latency(proposals=90).partition(graph, cluster, costs)
    assert set(found.device_of.values()) == {min(each_s, key=lambda d: each_s[d])}
    assert "all on one device" in found.reason


def test_branches_run_side_by_side_in_the_simulator() -> None:
    towers = [
        op(f"{tower}{i}", "aten.relu.default", Ref(f"{tower}{i - 1}" if i else "x"))
        for tower in "ab"
        for i in range(4)
    ]
    graph = graph_of([*towers, op("loss", "aten.add.Tensor", Ref("a3"), Ref("b3"), out=tensor(1))])
    cluster = cluster_of(device("d0"), device("d1"), link=Link(1e-6, 1e9))
    costs = random_costs(2, graph, cluster)
    found = Latency(proposals=90).partition(graph, cluster, costs)
    assert set(found.device_of.values()) == {"d0", "d1"}
    alone_s = [
        simulated_s(graph, costs, Placement({entry.name: d for entry in graph.ops}), 1)
        for d in ("d0", "d1")
    ]
    assert simulated_s(graph, costs, found, 1) < min(alone_s)


def test_works_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    cluster = unlike(1, 2)
    graph, costs = case(1, 10, cluster)
    assert Latency(proposals=30).partition(graph, cluster, costs).reason


def test_micro_batches_must_be_positive() -> None:
    with pytest.raises(InputError, match="at least 1 micro-batch"):
        Latency(0)
