"""How long each partitioner plans: the same chain of layers, then a graph with branches.

    make bench                                            # all benchmarks
    pytest tests/benchmarks/test_planning.py --benchmark-columns=median,iqr,rounds

Whole plans are timed (`make_plan`: estimate, place, cut, schedule, simulate), as `compare` reports
them. Needs no torch and no device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import AUTO, Options, Plan, Source, make_plan
from bigbrain_fx.planning import registry as plugins
from tests.support.synthetic import chain_graph, cluster_of, device, random_graph

OPS = 60
FEW_OPS = 6  # where nothing is measured
MICRO_BATCHES = 4
ROUNDS = 3
SHAPES = {"chain": chain_graph, "branches": random_graph}
LINK = Link(1e-4, 1e8)
UNLIKE = cluster_of(*(device(f"d{i}", speed) for i, speed in enumerate((4, 2, 1))), link=LINK)


def plan(graph: Graph, cluster: Cluster, name: str) -> Plan:
    """Plan a graph that nobody has looked at before: what it caches is worked out anew."""
    options = Options(name, micro_batches=MICRO_BATCHES)
    try:
        return make_plan(replace(graph), cluster, Source(""), options)
    except InputError as error:
        if not (error.help or "").startswith("pip install"):
            raise
        pytest.skip(f"{name} needs an extra: {error.help}")


@pytest.mark.gate("chain-dp-branches", "naive-chain")
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("name", [*plugins.names("partitioner"), AUTO])
def test_planning(benchmark: BenchmarkFixture, name: str, shape: str, measuring: bool) -> None:
    made = SHAPES[shape](7, OPS if measuring else FEW_OPS)
    graph = replace(made, batch=4 * MICRO_BATCHES)
    benchmark.group = f"planning, {shape} of {OPS} ops, 3 unlike devices"
    found = benchmark.pedantic(plan, (graph, UNLIKE, name), rounds=ROUNDS)
    benchmark.extra_info["forecast_step_s"] = found.forecast.step_s
    benchmark.extra_info["devices"] = len(found.stages.devices)
    assert set(found.placement.device_of) == {op.name for op in graph.ops}
