"""Plans for devices that share a host's cores or memory, and for GPUs that wait for processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster, Graph, Host
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    costs_of,
    from_json,
    judge,
    make_plan,
    replan,
    to_json,
)
from bigbrain_fx.plan.judge import held_up
from bigbrain_fx.planning import estimator
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


# ------------------------------------------------------------ GPUs and their processes


def gpus(*presets: str) -> Cluster:
    named = [{"name": f"d{i}", "host": "h", "preset": p} for i, p in enumerate(presets)]
    links = {"default": {"bandwidth": "10GB/s", "latency": "20us"}}
    return parse_cluster(json.dumps({"devices": named, "links": links}), "cluster.json")


def graph_of(name: str) -> Graph:
    return samples.sample(name).graph


def test_a_small_model_is_what_its_processes_take() -> None:
    graph, cluster = graph_of("gpt").at(2), gpus("h100", "t4")
    costs = estimator("analytical").estimate(graph, cluster)
    seen = held_up(costs)
    assert seen is not None
    for device in ("d0", "d1"):
        for op, cost in costs.ops[device].items():
            shown = seen.op_cost(op, device)
            assert (shown.forward_s, shown.backward_s) == (
                cost.host_forward_s,
                cost.host_backward_s,
            )
            assert 0.0 <= shown.backward_input_s <= shown.backward_s
            assert shown.saved_bytes == cost.saved_bytes
    assert sum(c.forward_s for c in seen.ops["d1"].values()) > sum(
        c.forward_s for c in costs.ops["d1"].values()
    )


@pytest.mark.parametrize("kind", ["cpu", "compiled"])
def test_ops_that_wait_for_no_process_keep_their_time(kind: str) -> None:
    cluster = samples.cluster(2) if kind == "cpu" else gpus("h100", "t4")
    name = "analytical" if kind == "cpu" else "compiled"
    assert held_up(estimator(name).estimate(graph_of("gpt").at(2), cluster)) is None


@pytest.mark.gate("gpt-m-etf", "gpt-m-sct")
@pytest.mark.parametrize("partitioner", ["chain-dp", "m-sct", "m-etf"])
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_no_plan_is_slower_and_some_are_much_faster(
    name: str, partitioner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = graph_of(name), gpus("v100-16", "t4"), Source("")
    options = Options(partitioner, micro_batches=4)
    now = make_plan(*about, options).forecast.step_s
    monkeypatch.setattr(judge, "held_up", lambda costs: None)
    before = make_plan(*about, options).forecast.step_s
    assert now <= before
    if (name, partitioner) == ("moe", "m-etf"):
        assert now < 0.8 * before
