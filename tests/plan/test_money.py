"""Money: closed forms, the devices that are worth their price, limits, and zones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Goals, Options, Plan, Source, make_plan, money, steps_for
from bigbrain_fx.plan.strategy.space import device_choices
from tests.plan.test_micro_batch_rows import wide
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device

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
