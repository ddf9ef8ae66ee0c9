"""Money of a plan, and several jobs on one cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Graph, Host, Link
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import (
    Goals,
    Options,
    Packing,
    PackJob,
    Plan,
    Source,
    make_plan,
    money,
    pack,
    part_of,
    steps_for,
)
from bigbrain_fx.plan.strategy.space import device_choices
from tests.plan.test_remedy import wide
from tests.support.messages import refused
from tests.support.synthetic import GIB, chain_graph, cluster_of, device

SOURCE = Source("model.py")
COST = Options("auto", effort="fast", objective="cost")
PRICES = (("a", 3.0), ("b", 0.5), ("c", 0.6))


def three(prices: tuple[tuple[str, float], ...] = PRICES) -> Cluster:
    """Three devices, the first four times as fast as the others."""
    each = (device("a", 4, host="x"), device("b", 1, host="y"), device("c", 1, host="z"))
    return replace(cluster_of(*each, link=Link(1e-5, 1e9)), prices=prices)


def planned(options: Options, where: Cluster | None = None) -> Plan:
    ops = tuple(replace(op, flops=f"{10**8}*B") for op in wide().ops)
    graph = replace(wide(8), ops=ops)
    return make_plan(graph, where or three(), SOURCE, replace(options, micro_batches=4))


def usd(plan: Plan) -> float:
    found = money(plan)
    assert found is not None
    return found.step_usd


def test_a_step_costs_its_time_and_its_messages() -> None:
    where = replace(three(), default_link=Link(1e-5, 1e9, usd_per_gb=1e6))
    plan = planned(Options("naive"), where)
    found = money(plan)
    assert found is not None
    assert found.hour_usd == 4.1
    on = [stage.device for stage in plan.stages.stages]
    sent = sum(4 * e.nbytes for e in plan.stages.edges if on[e.source] != on[e.target])
    assert sent > 0
    assert found.sent_usd == pytest.approx(sent / 1e9 * 1e6)
    assert found.step_usd == pytest.approx(4.1 * plan.forecast.step_s / 3600 + found.sent_usd)
    assert found.spent_hour_usd == pytest.approx(found.step_usd / plan.forecast.step_s * 3600)


def test_a_device_without_a_price_leaves_the_cost_unknown() -> None:
    assert money(planned(Options("naive"), three(PRICES[:2]))) is None


def test_the_cheapest_device_alone_is_the_cheapest_plan() -> None:
    plan = planned(COST)
    assert plan.stages.devices == ("b",)
    assert [device.name for device in plan.cluster.devices] == ["a", "b", "c"]
    options = Options("auto", effort="fast", micro_batches=4)
    alone = make_plan(plan.graph, cluster_of(device("b", 1)), SOURCE, options)
    assert usd(plan) == pytest.approx(0.5 * alone.forecast.step_s / 3600)
    chosen, *others = plan.rented
    assert chosen.devices == ("b",)
    assert all((other.step_usd or 0) >= usd(plan) for other in others)
    assert any("a" in other.devices for other in others)  # what it would add


def test_a_deadline_takes_the_cheapest_devices_that_meet_it() -> None:
    cheapest = planned(COST)
    tokens = 1000.0
    slow_s = steps_for(cheapest.graph, tokens) * cheapest.forecast.step_s
    goals = Goals(tokens=tokens, deadline_s=slow_s / 2)
    plan = planned(replace(COST, goals=goals))
    assert "a" in plan.stages.devices
    assert steps_for(plan.graph, tokens) * plan.forecast.step_s <= slow_s / 2
    assert usd(plan) > usd(cheapest)


def test_the_fastest_plan_within_a_price_by_the_hour() -> None:
    asked = Options("auto", effort="fast", goals=Goals(max_hour_usd=1.2))
    plan = planned(asked)
    assert plan.stages.devices == ("b", "c") or plan.stages.devices == ("c", "b")
    free = planned(Options("auto", effort="fast"))
    assert free.forecast.step_s < plan.forecast.step_s


@pytest.mark.parametrize(
    ("goals", "flag"),
    [
        (Goals(tokens=1e6, max_usd=1e-6), "--max-cost"),
        pytest.param(Goals(max_hour_usd=0.1), "--max-cost", marks=pytest.mark.nightly),
        (Goals(min_per_s=1e9), "--min-throughput"),
        pytest.param(Goals(tokens=1e6, deadline_s=1e-3), "--deadline", marks=pytest.mark.nightly),
    ],
)
def test_a_limit_that_nothing_keeps_to_names_the_nearest_plan(goals: Goals, flag: str) -> None:
    with refused("BX1345", NoPlanError) as caught:
        planned(replace(COST, goals=goals))
    remedy = str(caught.value.help)
    assert remedy.startswith(flag)
    limit = float(remedy.removeprefix(flag).strip().removesuffix("h").removesuffix("/"))
    field = {"--min-throughput": "min_per_s", "--deadline": "deadline_s"}.get(flag)
    field = field or ("max_usd" if goals.max_usd else "max_hour_usd")
    again = replace(goals, **{field: limit * (3600 if flag == "--deadline" else 1)})
    plan = planned(replace(COST, goals=again))  # the remedy is one
    if flag == "--max-cost":
        assert plan.stages.devices == ("b",)


@pytest.mark.parametrize(
    ("options", "prices", "code"),
    [
        (COST, PRICES[:2], "BX1346"),
        (Options("auto", goals=Goals(max_hour_usd=1.0)), (), "BX1346"),
        (Options("auto", goals=Goals(max_usd=1.0)), PRICES, "BX1347"),
        (Options("auto", goals=Goals(deadline_s=1.0)), (), "BX1347"),
    ],
)
def test_plans_without_a_count_are_refused(
    options: Options, prices: tuple[tuple[str, float], ...], code: str
) -> None:
    with refused(code):
        planned(options, three(prices))


def test_sets_of_devices_are_listed_once() -> None:
    assert device_choices(three()) != []
    alike = cluster_of(*(device(f"d{i}", host=f"h{i // 2}") for i in range(4)))
    assert device_choices(alike) == [("d0",), ("d0", "d1"), ("d0", "d1", "d2"), tuple(alike.device)]
    assert len(device_choices(three())) == 7
    assert device_choices(replace(alike, replicas=(("d0",), ("d1",)))) == [tuple(alike.device)]
    many = cluster_of(*(device(f"d{i}", 1 + i % 8, host=f"h{i}") for i in range(64)))
    assert len(device_choices(many)) == 2**8 - 1


# ------------------------------------------------------------------ zones

MIB = 2**20


def heavy(rows: int = 64) -> Graph:
    """Layers of 4 MiB of weights and 1 MiB of activations a row: 96 MiB with gradients, state."""
    graph = wide(rows)
    ops = tuple(replace(op, flops=f"{10**8}*B") for op in graph.ops)
    params = tuple(
        replace(p, spec=replace(p.spec, shape=(1 << 20,), strides=(1,))) for p in graph.params
    )
    return replace(graph, ops=ops, params=params)


def zoned(usd_per_gb: float = 0.0, far: Link | None = None) -> Cluster:
    """Two zones of two devices each, which hold less than the model; listed in turns."""
    devices = [device(n, 100, 115 * MIB, n) for n in ("a0", "b0", "a1", "b1")]
    link = far or Link(1e-3, 125e6, usd_per_gb=usd_per_gb)
    near = Link(1e-5, 1e10)
    prices = tuple((d.name, 1.0) for d in devices)
    where = cluster_of(*devices, link=link)
    return replace(where, links=(("a0", "a1", near), ("b0", "b1", near)), prices=prices)


@pytest.mark.nightly  # half a minute: every strategy on four devices
def test_replicas_are_across_zones_and_pipelines_inside() -> None:
    options = Options("auto", effort="fast", replicas=0, micro_batches=64)
    plan = make_plan(heavy(), zoned(), SOURCE, options)
    assert plan.stages.replicas == 2
    of = [{s.device for s in plan.stages.stages if s.replica == i} for i in range(2)]
    assert sorted(map(sorted, of)) == [["a0", "a1"], ["b0", "b1"]]


@pytest.mark.nightly  # half a minute: plans of every set of devices
def test_dear_bytes_between_zones_keep_a_plan_inside_one() -> None:
    options = Options("auto", effort="fast", replicas=0, objective="cost", micro_batches=64)
    plan = make_plan(heavy(), zoned(usd_per_gb=100.0), SOURCE, options)
    assert len({name[0] for name in plan.stages.devices}) == 1
    found = money(plan)
    assert found is not None
    assert found.sent_usd == 0.0


# --------------------------------------------------------------------------- several jobs


OPTIONS = Options("auto", effort="fast")


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
