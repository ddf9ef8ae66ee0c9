"""What every estimator promises, tried on the whole table: a new one is tested by being listed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import registry as plugins
from tests.support.examples import quick
from tests.support.hash_seeds import printed_under_hash_seeds
from tests.support.synthetic import cluster_of, device, random_graph

NAMES = plugins.names("estimator")

pytestmark = [
    pytest.mark.parametrize("name", NAMES),
    pytest.mark.usefixtures("learned_costs", "profile_database", "layer_times"),
]
seeds = st.integers(0, 10_000)


def unlike() -> Cluster:
    gpu = replace(device("gpu", 50), kind="cuda")
    return cluster_of(device("slow"), device("fast", 4), gpu)


@pytest.mark.gate("analytical", "compiled", "measured")
@quick(20)
@given(seed=seeds, count=st.integers(1, 25))
def test_every_op_has_the_same_sensible_figures_on_every_device(
    name: str, seed: int, count: int
) -> None:
    graph, cluster = random_graph(seed, count), unlike()
    costs = plugins.estimator(name).estimate(graph, cluster)
    assert costs == plugins.estimator(name).estimate(graph, unlike())
    assert costs.cluster == cluster
    assert set(costs.ops) == set(costs.optimizer_s_per_byte) == set(cluster.device)
    assert set(costs.optimizer_s_per_tensor) == set(cluster.device)
    for of_device in costs.ops.values():
        assert list(of_device) == [op.name for op in graph.ops]
        for cost in of_device.values():
            seconds = (cost.forward_s, cost.backward_s, cost.backward_input_s)
            assert all(math.isfinite(value) and value >= 0.0 for value in seconds)
            assert cost.backward_input_s <= cost.backward_s
            assert isinstance(cost.saved_bytes, int)
            assert cost.saved_bytes >= 0
            assert cost.workspace_bytes >= 0
    for op in (op for op in graph.ops if not op.requires_grad):
        cost = costs.op_cost(op.name, "slow")
        assert (cost.backward_s, cost.backward_input_s, cost.saved_bytes) == (0.0, 0.0, 0)


@quick(20)
@given(seed=seeds, count=st.integers(1, 25))
def test_a_faster_device_is_no_slower(name: str, seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    costs = plugins.estimator(name).estimate(graph, unlike())
    for op in graph.ops:
        slow, fast = costs.op_cost(op.name, "slow"), costs.op_cost(op.name, "fast")
        assert fast.forward_s <= slow.forward_s
        assert fast.backward_s <= slow.backward_s
    assert costs.optimizer_s_per_byte["fast"] <= costs.optimizer_s_per_byte["slow"]
    assert costs.optimizer_s_per_tensor["fast"] <= costs.optimizer_s_per_tensor["slow"]


@pytest.mark.nightly
def test_same_figures_under_four_hash_seeds(name: str) -> None:
    code = (
        "import sys; from bigbrain_fx.planning import registry as plugins; "
        "from tests.support.synthetic import cluster_of, device, random_graph; "
        "cluster = cluster_of(device('slow'), device('b', 2)); "
        "print(plugins.estimator(sys.argv[1]).estimate(random_graph(7, 30), cluster))"
    )
    assert len(printed_under_hash_seeds("-c", code, name)) == 1
