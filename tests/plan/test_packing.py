"""Several jobs on one cluster: plans, what slows them, the bound, the arithmetic of refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Graph, Host, Link
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Packing, PackJob, Source, make_plan, pack, part_of
from tests.support.synthetic import GIB, chain_graph, cluster_of, device

OPTIONS = Options("auto", effort="fast")
SOURCE = Source("model.py")


def work_graph(seed: int, count: int = 6, flops: int = 10**8) -> Graph:
    graph = chain_graph(seed, count)
    return replace(graph, ops=tuple(replace(op, flops=flops) for op in graph.ops))


def jobs(*graphs: Graph, steps: int = 10) -> list[PackJob]:
    return [PackJob(f"j{n}", g, SOURCE, OPTIONS, steps) for n, g in enumerate(graphs)]


def unlike(memory_bytes: int = GIB) -> Cluster:
    return cluster_of(*(device(f"d{n}", s, memory_bytes, f"h{n}") for n, s in enumerate((3, 1, 1))))


@pytest.fixture(scope="module")
def packed() -> Packing:
    return pack(jobs(work_graph(1, 4), work_graph(2, 3)), unlike())


def test_each_job_gets_devices_of_its_own(packed: Packing) -> None:
    given = [{d.name for d in job.plan.cluster.devices} for job in packed.jobs]
    assert given[0] & given[1] == set()
    assert packed.is_exact
    for job, graph in zip(packed.jobs, (work_graph(1, 4), work_graph(2, 3)), strict=True):
        again = make_plan(graph, job.plan.cluster, SOURCE, OPTIONS)
        assert job.ends_s == 10 * again.forecast.step_s
        alone = make_plan(graph, unlike(), SOURCE, OPTIONS)
        assert job.alone_s <= 10 * alone.forecast.step_s
    assert packed.last_s == max(job.ends_s for job in packed.jobs)


def test_nothing_ends_before_the_bound(packed: Packing) -> None:
    assert 0 < packed.bound_s <= min(packed.last_s, packed.in_turn_last_s) * (1 + 1e-9)


def test_the_mean_is_of_the_shortest_first(packed: Packing) -> None:
    short, long = sorted(job.alone_s for job in packed.jobs)
    assert packed.in_turn_mean_s == pytest.approx((short + short + long) / 2)
    assert packed.in_turn_last_s == pytest.approx(short + long)


def test_company_on_a_host_slows() -> None:
    two = cluster_of(device("a", host="x"), device("b", host="x"), device("c", host="y"))
    scarce = replace(two, hosts=(Host("x", nic_bytes_per_s=1e6, cores=1),))
    beside = part_of(scarce, ("a",), (("b",),))
    assert beside.devices[0].flops_per_s == scarce.devices[0].flops_per_s / 2
    assert beside.hosts == (Host("x", nic_bytes_per_s=5e5),)
    alone = part_of(scarce, ("a",), (("c",),))
    assert alone.devices[0] == scarce.devices[0]
    assert alone.hosts == scarce.hosts
    linked = replace(two, links=(("a", "c", Link(0.0, 1.0)), ("a", "b", Link(0.0, 2.0))))
    assert part_of(linked, ("a", "b"), (("c",),)).links == (("a", "b", Link(0.0, 2.0)),)


def test_jobs_that_do_not_fit_together_are_refused_with_the_arithmetic() -> None:
    graph = work_graph(1, 3)
    heavy = replace(
        graph,
        params=tuple(
            replace(p, spec=replace(p.spec, shape=(4000, 4000), strides=(4000, 1)))
            for p in graph.params
        ),
    )
    room = cluster_of(*(device(f"d{n}", 1.0, _half(heavy), f"h{n}") for n in range(2)))
    make_plan(heavy, room, SOURCE, OPTIONS)  # alone it fits
    with pytest.raises(NoPlanError) as refused:
        pack(jobs(heavy, heavy), room)
    text = str(refused.value)
    assert "j0, j1 do not fit together on 2 devices" in text
    assert "j0 fits on no less than d0 and d1" in text
    assert "needs" in text
    assert "and has" in text
    with pytest.raises(NoPlanError, match="j1 does not fit, even with every device"):
        pack(jobs(graph, heavy), cluster_of(*(device(n, 1.0, 200 * 2**20, n) for n in "ab")))


def _half(graph: Graph) -> int:
    """Return memory with room for a little more than half of a graph's tensors, on each device."""
    one = make_plan(graph, cluster_of(device("d", 1.0, 64 * GIB)), SOURCE, OPTIONS)
    return int(0.7 * one.forecast.devices[0].peak_bytes) + 300 * 2**20


def test_jobs_that_cannot_share_devices_are_refused() -> None:
    with pytest.raises(InputError, match="4 jobs need a device each"):
        pack(jobs(*(work_graph(n) for n in range(4))), unlike())
    with pytest.raises(InputError, match="replicas"):
        pack(jobs(work_graph(1), work_graph(2)), replace(unlike(), replicas=(("d0",), ("d1",))))
