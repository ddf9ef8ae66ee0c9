"""GPUs that wait for their processes: planners are shown that clock, too; the faster plan wins."""

from __future__ import annotations

import json

import pytest

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.plan import Options, Source, judge, make_plan
from bigbrain_fx.plan.judge import held_up
from bigbrain_fx.planning import estimator
from tests.support import samples


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
