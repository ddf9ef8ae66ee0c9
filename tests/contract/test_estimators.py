"""What every estimator promises, tried on the whole table: a new one is tested by being listed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import registry as plugins
from tests.support.examples import examples
from tests.support.synthetic import cluster_of, device, random_graph

ROOT = Path(__file__).resolve().parents[2]
NAMES = plugins.names("estimator")

pytestmark = [
    pytest.mark.parametrize("name", NAMES),
    pytest.mark.usefixtures("learned_costs", "profile_database", "layer_times"),
]
quick = settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)


def unlike() -> Cluster:
    gpu = replace(device("gpu", 50), kind="cuda")
    return cluster_of(device("slow"), device("fast", 4), gpu)


@pytest.mark.gate("analytical", "compiled", "measured")
@quick
@given(seed=seeds, count=st.integers(1, 25))
def test_every_op_has_sensible_figures_on_every_device(name: str, seed: int, count: int) -> None:
    graph, cluster = random_graph(seed, count), unlike()
    costs = plugins.estimator(name).estimate(graph, cluster)
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


@pytest.mark.gate("analytical", "compiled", "measured")
@quick
@given(seed=seeds, count=st.integers(1, 25))
def test_no_gradient_no_backward(name: str, seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    costs = plugins.estimator(name).estimate(graph, unlike())
    for op in graph.ops:
        if not op.requires_grad:
            cost = costs.op_cost(op.name, "slow")
            assert (cost.backward_s, cost.backward_input_s, cost.saved_bytes) == (0.0, 0.0, 0)


@quick
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


@pytest.mark.gate("analytical", "compiled", "measured")
@quick
@given(seed=seeds, count=st.integers(1, 25))
def test_the_same_again(name: str, seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    first = plugins.estimator(name).estimate(graph, unlike())
    assert first == plugins.estimator(name).estimate(graph, unlike())


@pytest.mark.nightly
def test_same_figures_under_four_hash_seeds(name: str) -> None:
    code = (
        "import sys; from bigbrain_fx.planning import registry as plugins; "
        "from tests.support.synthetic import cluster_of, device, random_graph; "
        "cluster = cluster_of(device('slow'), device('b', 2)); "
        "print(plugins.estimator(sys.argv[1]).estimate(random_graph(7, 30), cluster))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, name],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (0, 1, 42, 4711)
    ]
    printed = [process.communicate(timeout=60)[0] for process in runs]
    assert all(process.returncode == 0 for process in runs)
    assert len(set(printed)) == 1
