"""Plans for devices that share their host's cores or memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Host
from bigbrain_fx.plan import Options, Plan, Source, costs_of, from_json, make_plan, replan, to_json
from bigbrain_fx.planning.device_kinds import crowded
from tests.support import samples
from tests.support.synthetic import chain_graph

GRAPH = chain_graph(1, 6)  # a batch of 4 rows


def on_one_host(*hosts: Host, devices: int = 2) -> Cluster:
    alone = samples.cluster(devices)
    there = tuple(replace(device, host="here") for device in alone.devices)
    return replace(alone, devices=there, hosts=hosts)


def plan_of(cluster: Cluster, partitioner: str = "naive") -> Plan:
    return make_plan(GRAPH, cluster, Source("model.py"), Options(partitioner, micro_batches=2))


ONE_CORE = Host("here", cores=1)


def test_a_step_is_between_that_of_devices_alone_and_that_of_a_full_crowd() -> None:
    free, shared = plan_of(on_one_host()), plan_of(on_one_host(ONE_CORE))
    worst = plan_of(crowded(on_one_host(ONE_CORE)))
    assert free.forecast.step_s < shared.forecast.step_s < worst.forecast.step_s


def test_planners_are_told_what_ops_cost_in_a_crowd() -> None:
    costs = costs_of(plan_of(on_one_host(ONE_CORE)))
    assert costs.alone is not None
    for device, ops in costs.ops.items():
        for name, cost in ops.items():
            assert cost.forward_s == pytest.approx(2 * costs.alone.op_cost(name, device).forward_s)


def test_a_plan_that_is_read_again_gives_the_same_forecast() -> None:
    plan = plan_of(on_one_host(Host("here", 1e9, 1e9, 1)))
    again = from_json(to_json(plan), "plan.json")
    assert again.cluster == plan.cluster
    assert replan(again, again.cluster).forecast == plan.forecast


@pytest.mark.gate("host1")
@pytest.mark.parametrize("host", [ONE_CORE, Host("here", None, 13e9)])
def test_auto_is_never_below_its_bounds_where_devices_share(host: Host) -> None:
    plan = plan_of(on_one_host(host, devices=3), "auto")
    assert plan.search is not None
    assert all(bound.step_s <= plan.forecast.step_s for bound in plan.search.bounds)


@pytest.mark.nightly
def test_auto_knows_that_a_device_alone_is_not_slowed() -> None:
    """24 units on three devices are too many to try all; a pipeline on one core gains nothing."""
    graph = chain_graph(1, 24)
    options = Options("auto", micro_batches=4, effort="fast")
    shared = on_one_host(ONE_CORE, devices=3)
    plan = make_plan(graph, shared, Source("model.py"), options)
    single = make_plan(graph, on_one_host(ONE_CORE, devices=1), Source("model.py"), options)
    assert plan.forecast.step_s <= single.forecast.step_s * (1 + 1e-9)


@pytest.mark.gate("1")
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_single_micro_batch_goes_to_the_fastest_device(micro_batches: int) -> None:
    """Three devices of 60 share a core, one of 40 is alone: in a crowd they do 20."""
    alone = samples.cluster(4)
    one = replace(alone.devices[0], host="here", flops_per_s=60e9, memory_bytes_per_s=60e9)
    other = replace(one, host="there", flops_per_s=40e9, memory_bytes_per_s=40e9)
    names = [device.name for device in alone.devices]
    devices = tuple(replace(o, name=n) for o, n in zip((one, one, one, other), names, strict=True))
    shared = replace(alone, devices=devices, hosts=(ONE_CORE,))
    options = Options("m-sct", micro_batches=micro_batches)
    plan = make_plan(GRAPH, shared, Source("model.py"), options)
    used = set(plan.stages.devices)
    assert ("d3" not in used) if micro_batches == 1 else ("d3" in used)
