"""What every partitioner promises, over the whole table: a new one is tested by being listed."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster, Costs, Graph, Link, Partitioner, Placement
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.cut import cut, trained
from bigbrain_fx.plan.schedule import build, stage_costs
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.planning import registry as plugins
from bigbrain_fx.planning.units import units
from tests.support.examples import quick
from tests.support.hash_seeds import printed_under_hash_seeds
from tests.support.placements import simulated_s, unlike as unlike_links
from tests.support.synthetic import GIB, chain_graph, cluster_of, device, random_costs, random_graph

MICRO = 4
NAMES = plugins.names("partitioner")

pytestmark = pytest.mark.parametrize("name", NAMES)
seeds = st.integers(0, 10_000)


WITHOUT_LIMIT = ("naive", "m-topo", "scattered")
"""Look at no limit of memory: the ledger of a plan says whether it fits."""
QUICK = {"proposals": 60}  # how long methods search that can be told


def make(name: str) -> Partitioner:
    taken = plugins.options_of("partitioner", name)
    given = {"micro_batches": MICRO, **QUICK}
    return plugins.partitioner(name, **{key: given[key] for key in given if key in taken})


def unlike(count: int, memory_bytes: int = GIB) -> Cluster:
    devices = [device(f"d{i}", speed=1 + i % 3, memory_bytes=memory_bytes) for i in range(count)]
    return cluster_of(*devices, link=Link(1e-4, 1e7))


def place_or_explain(
    method: Partitioner, graph: Graph, cluster: Cluster, costs: Costs
) -> Placement | NoPlanError:
    try:
        return method.partition(graph, cluster, costs)
    except NoPlanError as error:
        return error


def placed(
    name: str, seed: int, count: int, devices: int
) -> tuple[Graph, Cluster, Costs, Placement]:
    graph, cluster = random_graph(seed, count), unlike(devices)
    costs = random_costs(seed, graph, cluster)
    return graph, cluster, costs, make(name).partition(graph, cluster, costs)


@pytest.mark.gate("chain-dp", "m-etf", "m-sct", "m-topo", "naive", "scattered")
@quick(15)
@given(seed=seeds, count=st.integers(1, 30), devices=st.integers(1, 4))
def test_every_op_gets_a_known_device_beside_those_of_its_unit_and_again(
    name: str, seed: int, count: int, devices: int
) -> None:
    graph, cluster, costs, placement = placed(name, seed, count, devices)
    assert set(placement.device_of) == {op.name for op in graph.ops}
    assert set(placement.device_of.values()) <= set(cluster.device)
    assert placement.reason
    for group in units(graph).groups:
        assert len({placement.device_of[op] for op in group}) == 1
    assert make(name).partition(graph, cluster, costs) == placement


@quick(15)
@given(seed=seeds, count=st.integers(1, 30))
def test_one_device_takes_it_all(name: str, seed: int, count: int) -> None:
    _, _, _, placement = placed(name, seed, count, 1)
    assert set(placement.device_of.values()) == {"d0"}


@pytest.mark.gate("chain-dp", "m-etf", "m-sct")
@quick(40)
@given(seed=seeds, count=st.integers(1, 20), devices=st.integers(1, 4), kib=st.integers(2, 200))
def test_memory_is_kept_or_no_plan_made(
    name: str, seed: int, count: int, devices: int, kib: int
) -> None:
    """The judge is the simulator, which executes the very programs that a device would."""
    if name in WITHOUT_LIMIT:
        pytest.skip("a plan says whether it fits: see tests/plan/test_remedy.py")
    graph, cluster = random_graph(seed, count), unlike(devices, kib * 1024)
    costs = random_costs(seed, graph, cluster)
    placement = place_or_explain(make(name), graph, cluster, costs)
    if isinstance(placement, NoPlanError):
        assert placement.help
        assert placement.nearest or any("needs" in note for note in placement.notes)
        return
    stages = cut(graph, placement, graph.batch)
    per_stage = stage_costs(graph, stages, costs)
    in_flight = None if stages.is_chain else (MICRO,) * len(stages.devices)
    schedule = "1f1b" if stages.is_chain else "list"
    programs = build(schedule, stages, MICRO, per_stage, trained(graph, stages.stages), in_flight)
    for entry in simulate(programs, stages, per_stage).devices:
        assert entry.peak_bytes <= cluster.device[entry.device].memory_bytes


@pytest.mark.gate("chain-dp", "m-etf", "m-sct", "m-topo", "scattered")
@quick(4)
@given(seed=seeds, count=st.integers(1, 20), devices=st.integers(2, 4))
def test_the_order_of_the_list_does_not_matter(
    name: str, seed: int, count: int, devices: int
) -> None:
    if name == "naive":
        pytest.skip("it takes the devices as they are listed: see tests/partitioners/test_naive.py")
    cluster = unlike_links(seed, devices)
    graph = random_graph(seed, count)
    listed = random.Random(seed).sample(cluster.devices, devices)
    costs = random_costs(seed, graph, cluster)
    again = replace(costs, cluster=replace(cluster, devices=tuple(listed)))
    found = make(name).partition(graph, cluster, costs)
    other = make(name).partition(graph, again.cluster, again)
    steps_s = [simulated_s(graph, costs, placement, MICRO) for placement in (found, other)]
    assert steps_s[1] == pytest.approx(steps_s[0], rel=0.01)


def test_more_devices_than_ops(name: str) -> None:
    graph, cluster = chain_graph(1, 2), unlike(5)
    costs = random_costs(1, graph, cluster)
    assert len(make(name).partition(graph, cluster, costs).device_of) == 2


def test_no_memory_at_all_is_refused(name: str) -> None:
    if name in WITHOUT_LIMIT:
        pytest.skip("a plan says whether it fits: see tests/plan/test_remedy.py")
    graph, cluster = chain_graph(1, 6), unlike(2, memory_bytes=100)
    with pytest.raises(NoPlanError, match="memory") as caught:
        make(name).partition(graph, cluster, random_costs(1, graph, cluster))
    assert caught.value.exit_code == 3


@pytest.mark.nightly
def test_same_placement_under_four_hash_seeds(name: str) -> None:
    (digest,) = printed_under_hash_seeds(str(Path(__file__).resolve()), name)
    assert digest


def _main(name: str) -> None:
    parts = []
    for seed in range(3):
        _, _, _, placement = placed(name, seed, 25, 4)
        parts.append(json.dumps([dict(placement.device_of), placement.reason]))
    print(hashlib.sha256("".join(parts).encode()).hexdigest())


if __name__ == "__main__":
    _main(sys.argv[1])
