"""A training while devices come and go: time, work and money by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Device, Period
from bigbrain_fx.plan import Options, OverTime, Plan, Source, make_plan, over_time
from tests.plan.test_micro_batch_rows import wide
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device

COLD_S, REFORM_S = 15.0, 1.0  # as `Assumptions` has them


def where(count: int = 3, memory_bytes: int = 2**30) -> Cluster:
    """Devices on hosts of their own, at 1, 2, 3 ... dollars an hour."""
    devices = [device(f"d{i}", 1, memory_bytes, f"h{i}") for i in range(count)]
    prices = tuple((each.name, 1.0 + i) for i, each in enumerate(devices))
    return replace(cluster_of(*devices), prices=prices)


def made(cluster: Cluster, **how: object) -> Plan:
    ops = tuple(replace(op, flops=f"{10**8}*B") for op in wide().ops)
    options = Options(**{"partitioner": "chain-dp", "micro_batches": 4, **how})  # type: ignore[arg-type]
    return make_plan(replace(wide(8), ops=ops), cluster, Source("m.py"), options)


def followed(plan: Plan, *periods: tuple[float, float, str]) -> OverTime:
    each = [Period(start, end, tuple(names.split())) for start, end, names in periods]
    return over_time(plan, each)


def test_devices_that_stay_give_price_times_time() -> None:
    plan = made(where())
    found = followed(plan, (0, 2, "d0 d1 d2"))
    used = sum(where().price[name] for name in plan.stages.devices)
    assert found.usd == pytest.approx(2 * used)
    assert found.computed == pytest.approx(7200 / plan.forecast.step_s * 8)
    assert found.lost_s == 0
    assert found.planning_s < 0.1


def test_a_lost_device_undoes_work_since_the_checkpoint_and_is_planned_without() -> None:
    plan = made(where())
    found = followed(plan, (0, 1, "d0 d1 d2"), (1, 3, "d0 d1"))
    first, second = found.stretches
    assert (first.how, second.how) == ("start", "resplit")
    assert set(second.devices) <= {"d0", "d1"}
    assert second.undone_s == pytest.approx(3600 % found.checkpoint_s)
    assert second.stopped_s > COLD_S
    assert second.step_s is not None
    done = (7200 - second.stopped_s) / second.step_s - second.undone_s / plan.forecast.step_s
    assert second.steps == pytest.approx(done)
    assert 0 < second.planning_s < 5


def test_replicas_go_on_without_one_and_begin_a_step_again() -> None:
    plan = made(where(2), replicas=2, sum_order="micro")
    found = followed(plan, (0, 1, "d0 d1"), (1, 2, "d0"), (2, 3, "d0 d1"))
    ways = [each.how for each in found.stretches]
    assert ways == ["start", "elastic", "resplit"]
    alone = found.stretches[1]
    assert alone.step_s == pytest.approx(2 * plan.forecast.step_s)
    assert alone.stopped_s == REFORM_S
    assert alone.steps == pytest.approx((3600 - REFORM_S) / (2 * plan.forecast.step_s) - 1)
    assert alone.usd == pytest.approx(1.0)
    charged = replace(plan.cluster.default_link, usd_per_gb=100.0)
    dear = replace(plan, cluster=replace(plan.cluster, default_link=charged))
    both, one = followed(dear, (0, 1, "d0 d1"), (1, 2, "d0")).stretches
    assert (both.usd or 0) > 3.1
    assert one.usd == pytest.approx(1.0)  # nobody is left to be sent sums
    in_order_of_replicas = made(where(2), replicas=2, sum_order="replica")
    again = followed(in_order_of_replicas, (0, 1, "d0 d1"), (1, 2, "d0"))
    assert again.stretches[1].how == "resplit"


def test_nothing_is_computed_or_paid_while_nothing_fits() -> None:
    with_room = where(2, 64 * 2**20)
    plan = made(with_room, micro_batches=8)
    assert len(plan.stages.devices) == 2
    small = replace(plan, cluster=replace(with_room, devices=_smaller(with_room)))
    found = followed(small, (0, 1, "d0 d1"), (1, 2, "d1"), (2, 3, "d0 d1"))
    assert [each.how for each in found.stretches] == ["start", "wait", "resplit"]
    assert found.stretches[1].devices == ()
    assert found.stretches[1].usd == 0.0


def _smaller(cluster: Cluster) -> tuple[Device, ...]:
    return tuple(replace(each, memory_bytes=42 * 2**20) for each in cluster.devices)


def test_devices_that_come_are_used_where_they_pay() -> None:
    plan = made(where())
    found = followed(plan, (0, 1, "d0"), (1, 2, "d0 d1 d2"), (2, 3, "d0 d1 d2"))
    assert [each.how for each in found.stretches] == ["start", "resplit", "same"]
    assert found.stretches[1].undone_s == 0.0


def test_inference_loses_nothing() -> None:
    plan = made(where())
    with refused("BX1348"):
        followed(replace(plan, graph=replace(plan.graph, training=False)), (0, 1, "d0"))
