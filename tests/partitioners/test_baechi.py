"""Baechi's three: the list scheduler, favourite children, fusion, memory, and m-topo's shares."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster, Costs, Graph, Link, Op, OpCost, Ref
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning.unit_work import work
from partitioners.baechi import favorite_children, fused, prepared
from partitioners.jobs import Jobs, Timetable, timetable
from partitioners.m_etf import METF
from partitioners.m_sct import MSCT
from partitioners.m_topo import MTopo, filled
from tests.support.examples import quick
from tests.support.synthetic import (
    GIB,
    chain_graph,
    cluster_of,
    device,
    graph_of,
    op,
    random_costs,
    random_graph,
    tensor,
)

seeds = st.integers(0, 10_000)


class Bytes:
    """Room counted in bytes, for tests without a graph."""

    def __init__(self, nbytes: Sequence[float], memory: Sequence[float]) -> None:
        self.nbytes, self.left = nbytes, list(memory)

    def has_room(self, unit: int, device: int) -> bool:
        return self.nbytes[unit] <= self.left[device]

    def move(self, unit: int, to: int) -> None:
        self.left[to] -= self.nbytes[unit]


def jobs_of(
    times: Sequence[float], after: Sequence[Sequence[int]], move: float, devices: int = 2
) -> Jobs:
    """Every job makes one value, which those after it read; devices are alike."""
    befores = tuple(tuple(before) for before in after)
    table = np.tile(np.array(times, dtype=np.float64), (devices, 1))
    return Jobs(table, befores, tuple(range(len(times))), befores, lambda v, a, b: move)


def run(jobs: Jobs, favourite: dict[int, int] | None = None) -> Timetable:
    devices, count = jobs.times.shape
    return timetable(jobs, Bytes([0.0] * count, [1.0] * devices), favourite)


def drawn(seed: int, count: int, devices: int, move: float) -> Jobs:
    dice = random.Random(seed)
    after = [sorted(dice.sample(range(j), min(j, dice.choice((0, 1, 2))))) for j in range(count)]
    return jobs_of([dice.choice((1.0, 2.0, 5.0)) for _ in range(count)], after, move, devices)


def least_makespan(jobs: Jobs) -> float:
    """Try every assignment, and every order of starting: no transfers, devices alike."""
    times = jobs.times[0]

    def finish(done: dict[int, float], free: tuple[float, ...], best: float) -> float:
        if len(done) == len(times):
            return min(best, max(free))
        for job, before in enumerate(jobs.after):
            if job in done or not all(b in done for b in before):
                continue
            for d in sorted({f: i for i, f in enumerate(free)}.values()):
                end = max([free[d], *(done[b] for b in before)]) + times[job]
                if end < best:
                    later = (*free[:d], end, *free[d + 1 :])
                    best = finish({**done, job: end}, tuple(sorted(later)), best)
        return best

    return finish({}, (0.0,) * len(jobs.times), float("inf"))


# --------------------------------------------------------------------------- the list scheduler


@quick(60)
@given(seed=seeds, count=st.integers(1, 7), devices=st.integers(1, 3))
def test_is_within_the_bound_when_moving_is_free(seed: int, count: int, devices: int) -> None:
    jobs = drawn(seed, count, devices, 0.0)
    best = least_makespan(jobs)
    for favourite in (None, favorite_children(jobs)):
        assert run(jobs, favourite).makespan <= (2 - 1 / devices) * best * (1 + 1e-9)


@quick(60)
@given(
    seed=seeds, count=st.integers(1, 20), devices=st.integers(1, 3), move=st.sampled_from((0, 1, 9))
)
def test_a_timetable_can_be_kept(seed: int, count: int, devices: int, move: float) -> None:
    jobs = drawn(seed, count, devices, move)
    for favourite in (None, favorite_children(jobs)):
        found = run(jobs, favourite)
        ends = [s + jobs.times[0, j] for j, s in enumerate(found.starts)]
        for job, before in enumerate(jobs.after):
            for b in before:
                away = found.homes[b] != found.homes[job]
                assert found.starts[job] >= ends[b] + (move if away else 0) - 1e-9
        for d in range(devices):
            mine = sorted((found.starts[j], ends[j]) for j, h in enumerate(found.homes) if h == d)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))
        assert found.makespan == pytest.approx(max(ends))


def test_a_chain_stays_on_one_device() -> None:
    found = run(jobs_of([1, 1, 1, 1], [(), (0,), (1,), (2,)], 0.5))
    assert found.homes == (0, 0, 0, 0)
    assert found.makespan == 4.0


def test_two_branches_run_at_once_when_moving_is_cheap() -> None:
    after = [(), (0,), (0,), (1, 2)]
    assert run(jobs_of([1, 4, 4, 1], after, 0.5)).makespan == 6.5  # 1 + 0.5 + 4 + 1
    assert len(set(run(jobs_of([1, 4, 4, 1], after, 0.5)).homes)) == 2
    assert len(set(run(jobs_of([1, 4, 4, 1], after, 50.0)).homes)) == 1


def test_a_value_is_sent_once_and_one_at_a_time() -> None:
    """0 and 1 feed 3 and 4, which have room on device 1 only: two moves in turn, then none."""
    jobs = jobs_of([1, 1, 1, 1, 1], [(), (), (), (0, 1), (0, 1, 3)], 10.0)
    room = Bytes([1, 1, 5, 5, 5], [2.0, 50.0])
    found = timetable(jobs, room)
    assert found.homes[3:] == (1, 1)
    makers = [j for j in (0, 1) if found.homes[j] == 0]
    assert found.starts[3] == max(found.starts[j] for j in makers) + 1 + 10 * len(makers) - (
        0 if len(makers) == 1 else 1
    )
    assert found.starts[4] == found.starts[3] + 1


def test_an_op_that_fits_nowhere_is_not_placed() -> None:
    found = timetable(jobs_of([1, 1], [(), (0,)], 1.0), Bytes([1, 9], [5.0, 5.0]))
    assert found.homes == (0, -1)


def test_unlike_devices_may_refuse_a_job() -> None:
    jobs = jobs_of([1, 1], [(), ()], 1.0)
    jobs = replace(jobs, times=np.array([[1.0, np.inf], [3.0, 3.0]]))
    assert run(jobs).homes == (0, 1)


def test_a_device_waits_for_the_favourite_of_what_it_ran() -> None:
    """2 reads 0, dear to send, and 1; 3 reads 0 only, and comes first unless 2 is awaited."""
    jobs = jobs_of([1, 2, 2, 5], [(), (), (0, 1), (0,)], 0.0)
    jobs = replace(jobs, move=lambda value, a, b: 4.0 if value == 0 else 0.0)
    greedy, awake = run(jobs), run(jobs, {0: 2})
    assert (greedy.starts[3], greedy.starts[2]) == (1.0, 5.0)  # 2 goes to the other device, late
    assert (awake.starts[2], awake.starts[3]) == (2.0, 4.0)
    assert awake.homes[0] == awake.homes[2] == awake.homes[3]


# --------------------------------------------------------------------------- favourite children


@quick(60)
@given(seed=seeds, count=st.integers(1, 25))
def test_favourites_are_a_matching_of_edges(seed: int, count: int) -> None:
    jobs = drawn(seed, count, 2, 1.0)
    found = favorite_children(jobs)
    assert len(set(found.values())) == len(found)
    assert all(parent in jobs.after[child] for parent, child in found.items())


def test_the_dear_edge_of_the_long_path_is_the_favourite() -> None:
    """Two children of 0; the one with more work behind it should follow at once."""
    jobs = jobs_of([1, 1, 9], [(), (0,), (0,)], 3.0)
    assert favorite_children(jobs) == {0: 2}


# --------------------------------------------------------------------------- graphs


def branches(count: int, length: int, width: int = 4) -> Graph:
    """Make branches that a last op joins."""
    ops: list[Op] = []
    for i, j in product(range(count), range(length)):
        before = f"b{i}_{j - 1}" if j else "x"
        ops.append(op(f"b{i}_{j}", "aten.linear.default", Ref(before), out=tensor(4, width)))
    ends = tuple(Ref(f"b{i}_{length - 1}") for i in range(count))
    return graph_of([*ops, op("loss", "aten.sum.default", ends, out=tensor(1))])


def even_costs(graph: Graph, cluster: Cluster, saved_bytes: int = 0) -> Costs:
    each = {entry.name: OpCost(1.0, 2.0, 1.0, saved_bytes) for entry in graph.ops}
    return Costs(
        {d.name: each for d in cluster.devices}, cluster, {d.name: 0.0 for d in cluster.devices}
    )


@pytest.mark.parametrize("method", [METF, MSCT])
def test_branches_are_spread_and_chains_are_not(method: type[METF] | type[MSCT]) -> None:
    cluster = cluster_of(device("d0"), device("d1"), link=Link(1e-3, 1e9))
    graph = branches(2, 3)
    placement = method(4).partition(graph, cluster, even_costs(graph, cluster))
    homes = [placement.device_of[f"b{i}_{j}"] for i in range(2) for j in range(3)]
    assert homes in (["d0"] * 3 + ["d1"] * 3, ["d1"] * 3 + ["d0"] * 3)
    chain = chain_graph(3, 8, skips=False)
    placement = method(4).partition(chain, cluster, even_costs(chain, cluster))
    assert len(set(placement.device_of.values())) == 1


@pytest.mark.parametrize("method", [METF, MSCT])
def test_memory_makes_a_chain_go_on_elsewhere(method: type[METF] | type[MSCT]) -> None:
    chain = chain_graph(3, 8, skips=False)
    small = cluster_of(device("d0", memory_bytes=3 << 20), device("d1", memory_bytes=3 << 20))
    placement = method(1).partition(chain, small, even_costs(chain, small, 600_000))
    assert len(set(placement.device_of.values())) == 2
    tiny = cluster_of(device("d0", memory_bytes=1 << 20), device("d1", memory_bytes=2 << 20))
    with pytest.raises(NoPlanError, match=method.name) as caught:
        method(1).partition(chain, tiny, even_costs(chain, tiny, 3_000_000))
    assert set((caught.value.nearest or {}).values()) == {"d1"}


@quick(60)
@given(seed=seeds, count=st.integers(1, 25))
def test_no_fused_unit_is_placed_where_it_does_not_fit(seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    cluster = cluster_of(*(device(f"d{i}", memory_bytes=20 << 10) for i in range(3)))
    ready = prepared(graph, cluster, random_costs(seed, graph, cluster), 3, (3, 1))
    ledger = ready.ledger()
    found = timetable(ready.jobs, ledger)
    assert tuple(ledger.homes) == found.homes
    assert all(ledger.fits(home) for home in found.homes if home >= 0)


def test_fusion_joins_chains_and_leaves_branches() -> None:
    graph = branches(2, 3)
    cluster = cluster_of(device("d0"), device("d1"), link=Link(0.0, 1e12))
    costs = even_costs(graph, cluster)
    found = fused(work(graph, costs), cluster, costs, 1)
    assert [len(group) for group in found.groups] == [3, 3, 1]
    slow = replace(cluster, default_link=Link(100.0, 1e12))
    costs = even_costs(graph, slow)
    found = fused(work(graph, costs), slow, costs, 1)
    assert [len(group) for group in found.groups] == [7]  # no branch is worth sending


@quick(60)
@given(seed=seeds, count=st.integers(1, 25))
def test_fusion_makes_no_cycle(seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    cluster = cluster_of(device("d0"), device("d1"))
    costs = random_costs(seed, graph, cluster)
    known = work(graph, costs)
    found = fused(known, cluster, costs, 1)
    assert all(maker < reader for maker, reader in found.edges)
    names = [name for group in found.groups for name in group]
    assert sorted(names) == sorted(name for group in known.groups for name in group)


@pytest.mark.gate("METF")
@pytest.mark.parametrize("method", [METF, MSCT])
def test_two_thousand_ops_take_seconds(method: type[METF] | type[MSCT]) -> None:
    """The limit is 30 s; one quiet core takes about 5."""
    graph = branches(4, 500)
    cluster = cluster_of(*(device(f"d{i}", memory_bytes=GIB) for i in range(4)))
    costs = even_costs(graph, cluster, 500_000)
    start = time.process_time()
    placement = method(1).partition(graph, cluster, costs)
    assert time.process_time() - start < 30
    assert len(set(placement.device_of.values())) == 4


# --------------------------------------------------------------------------- m-topo


def test_m_topo_fills_by_memory() -> None:
    assert filled([1, 1, 1, 1, 1, 1], [9.0, 9.0]) == [0, 0, 0, 0, 1, 1]  # 6 / 2 + 1 each
    assert filled([1, 1, 1, 1, 1, 1], [9.0, 18.0]) == [0, 0, 0, 1, 1, 1]
    assert filled([1, 1], [float("inf")] * 2) == [0, 0]
    assert filled([], [1.0]) == []


def test_m_topo_on_a_chain() -> None:
    chain = chain_graph(3, 8, skips=False)
    cluster = cluster_of(device("d0"), device("d1"))
    placement = MTopo().partition(chain, cluster, even_costs(chain, cluster, 10_000))
    homes = [placement.device_of[entry.name] for entry in chain.ops]
    assert homes == sorted(homes)
    assert set(homes) == {"d0", "d1"}
    assert "by memory" in placement.reason
