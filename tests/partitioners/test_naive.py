"""`naive` and `scattered`: equal counts in order, and a seeded die."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Costs, Graph, Partitioner, Ref
from bigbrain_fx.planning.unit_work import work
from partitioners.chain_dp import in_flight_by_device, upstream
from partitioners.naive import Naive
from partitioners.scattered import Scattered
from tests.support.synthetic import (
    chain_graph,
    cluster_of,
    device,
    graph_of,
    op,
    random_costs,
    random_graph,
)


def row(count: int, devices: int) -> tuple[Graph, Cluster, Costs]:
    graph = chain_graph(0, count, skips=False)
    cluster = cluster_of(*(device(f"d{i}", speed=1 + i) for i in range(devices)))
    return graph, cluster, random_costs(0, graph, cluster)


def homes(graph: Graph, method: Partitioner, cluster: Cluster, costs: Costs) -> str:
    placement = method.partition(graph, cluster, costs)
    return " ".join(placement.device_of[entry.name] for entry in graph.ops)


@pytest.mark.parametrize(
    ("count", "backwards", "expected"),
    [
        (6, False, "d0 d0 d1 d1 d2 d2"),
        (6, True, "d2 d2 d1 d1 d0 d0"),
        (7, False, "d0 d0 d0 d1 d1 d2 d2"),
    ],
)
def test_equal_numbers_in_the_order_of_the_list_whatever_the_speed(
    count: int, backwards: bool, expected: str
) -> None:
    graph, cluster, costs = row(count, 3)
    listed = replace(cluster, devices=cluster.devices[:: -1 if backwards else 1])
    assert homes(graph, Naive(), listed, replace(costs, cluster=listed)) == expected


def test_a_replicated_op_goes_to_its_first_reader() -> None:
    graph = random_graph(3, 12)
    assert graph.ops[0].name == "mask"
    cluster = cluster_of(device("d0"), device("d1"))
    placement = Naive().partition(graph, cluster, random_costs(3, graph, cluster))
    readers = graph.consumers["mask"]
    assert readers
    assert placement.device_of["mask"] == placement.device_of[readers[0]]


def test_either_of_two_towers_may_come_first() -> None:
    """d0 feeds d1 and d2, which do not know each other, and d3 joins them."""
    joined = (Ref("left"), Ref("right"))
    ops = [
        op("stem", "aten.relu.default", Ref("x")),
        op("left", "aten.relu.default", Ref("stem")),
        op("right", "aten.relu.default", Ref("stem")),
        op("join", "aten.add.Tensor", *joined),
    ]
    graph = graph_of(ops)
    cluster = cluster_of(*(device(f"d{i}") for i in range(4)))
    known = work(graph, random_costs(0, graph, cluster))
    homes = ["d0", "d1", "d2", "d3"]
    found = in_flight_by_device(upstream(known, homes), micro_batches=8, in_flight=None)
    assert found == {"d0": 4, "d1": 3, "d2": 3, "d3": 1}


def test_scattered_uses_every_device_and_its_seed() -> None:
    graph, cluster, costs = row(30, 3)
    first = homes(graph, Scattered(seed=1), cluster, costs)
    assert set(first.split()) == {"d0", "d1", "d2"}
    assert first == homes(graph, Scattered(seed=1), cluster, costs)
    assert first != homes(graph, Scattered(seed=2), cluster, costs)


def test_an_empty_graph_is_placed() -> None:
    graph = replace(chain_graph(0, 1), ops=(op("m", "aten.ones.default"),), outputs=(), loss=None)
    graph = replace(graph, ops=(replace(graph.ops[0], outputs=()),), params=())
    cluster = cluster_of(device("d0"), device("d1"))
    costs = random_costs(0, graph, cluster)
    for method in (Naive(), Scattered()):
        assert method.partition(graph, cluster, costs).device_of == {"m": "d0"}
