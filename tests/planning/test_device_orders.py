"""Device orders are made of links and rates, also of many devices."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from bigbrain_fx.core import Cluster, Device, Graph, Link
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.planning import looked_at, of_how_many
from bigbrain_fx.planning.device_kinds import seen_devices
from tests.support.rough import device_orders
from tests.support.synthetic import chain_graph, cluster_of, device

FAST, SLOW = Link(1e-5, 1e8), Link(2e-4, 4e6)
PATTERNS = range(20)
EVERY_CHANGE = 4  # of them are tried by `make test`, all by `make promise`
DRAWN = [
    seed if seed < EVERY_CHANGE else pytest.param(seed, marks=pytest.mark.nightly)
    for seed in PATTERNS
]


def heavy_chain(seed: int, count: int) -> Graph:
    graph = chain_graph(seed, count, skips=False)
    return replace(graph, ops=tuple(replace(op, flops=2 * 10**7) for op in graph.ops))


def pattern(seed: int) -> Cluster:
    """Draw fast links among slow ones: a path, racks, or any pairs; devices alike, or of two kinds.

    The names say nothing of the links.
    """
    dice = random.Random(seed)
    count = dice.choice((6, 7, 8))
    names = [f"d{i}" for i in range(count)]
    along = dice.sample(names, count)
    pairs = {
        0: list(pairwise(along)),
        1: [(a, b) for i, a in enumerate(along) for b in along[i + 1 : i + 3 - i % 3]],
        2: [(a, b) for a in names for b in names if a < b and dice.random() < 0.4],
    }[seed % 3]
    speeds = [dice.choice((1, 1 + seed % 2)) for _ in names]
    devices = tuple(device(name, speed) for name, speed in zip(names, speeds, strict=True))
    return Cluster(devices, SLOW, tuple((a, b, FAST) for a, b in pairs))


def relisted(cluster: Cluster, seed: int) -> Cluster:
    devices = list(cluster.devices)
    random.Random(seed).shuffle(devices)
    return replace(cluster, devices=tuple(devices))


def step_s(graph: Graph, cluster: Cluster, partitioner: str) -> float:
    options = Options(partitioner, micro_batches=4, effort="fast")
    return make_plan(graph, cluster, Source("model.py"), options).forecast.step_s


@pytest.mark.gate("chain-dp-0")
@pytest.mark.parametrize("seed", DRAWN)
@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_the_order_of_the_list_does_not_matter(partitioner: str, seed: int) -> None:
    graph, cluster = heavy_chain(seed, 8), pattern(seed)
    first = step_s(graph, cluster, partitioner)
    assert step_s(graph, relisted(cluster, seed), partitioner) == pytest.approx(first, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_a_fast_path_is_found_whatever_the_names(seed: int) -> None:
    """Eight alike devices along a path of fast links, listed along it, and by drawn names."""
    names = [f"d{i}" for i in range(8)]
    drawn = random.Random(seed).sample(names, 8)
    graph = heavy_chain(1, 12)

    def along(order: list[str]) -> Cluster:
        links = tuple((a, b, FAST) for a, b in pairwise(order))
        return Cluster(tuple(map(device, names)), SLOW, links)

    for partitioner in ("chain-dp", "auto"):
        listed = step_s(graph, along(names), partitioner)
        assert step_s(graph, along(drawn), partitioner) <= 1.01 * listed


def test_racks_are_kept_together() -> None:
    """Three racks of four, listed in turns: the best order crosses between racks twice."""
    devices = [device(f"d{i}", host=f"rack{i % 3}") for i in range(12)]
    links = tuple(
        (a.name, b.name, FAST)
        for a in devices
        for b in devices
        if a.name < b.name and a.host == b.host
    )
    cluster = Cluster(tuple(devices), SLOW, links)
    whole = next(order for order in device_orders(cluster, 200) if len(order) == 12)
    racks = [cluster.device[name].host for name in whole]
    assert sum(a != b for a, b in pairwise(racks)) == 2


@pytest.mark.parametrize("seed", PATTERNS)
def test_orders_are_the_same_for_any_order_of_the_list(seed: int) -> None:
    cluster = pattern(seed)
    assert seen_devices(relisted(cluster, seed)) == seen_devices(cluster)
    assert device_orders(relisted(cluster, seed), 100) == device_orders(cluster, 100)


def test_few_devices_are_tried_in_every_order() -> None:
    unlike = cluster_of(*(device(f"d{i}", 1 + i) for i in range(4)))
    found = device_orders(unlike, 2000)
    names = [d.name for d in unlike.devices]
    assert set(found) == {p for count in range(1, 5) for p in permutations(names, count)}


def test_devices_that_could_change_places_count_as_one() -> None:
    """Of every order of every subset one is left: that with the first of each kind first."""
    alike = cluster_of(*(device(f"d{i}", 1 + i // 2) for i in range(4)))
    names = [d.name for d in alike.devices]
    kind = dict(zip(names, (0, 0, 1, 1), strict=True))
    every = [p for count in range(1, 5) for p in permutations(names, count)]
    found = device_orders(alike, 2000)
    assert len(found) == len(set(found)) == len({tuple(map(kind.__getitem__, p)) for p in every})
    assert set(found) <= set(every)
    for order in found:
        for first, second in (("d0", "d1"), ("d2", "d3")):
            assert second not in order or first in order[: order.index(second)]


def test_devices_of_two_precisions_are_two_kinds() -> None:
    """Equal in float32, and one of them twice as fast in float16."""
    halves = [replace(device(f"d{i}"), half_flops_per_s=1e9 * (1 + i)) for i in range(2)]
    assert ("d0", "d1") in (found := device_orders(cluster_of(*halves), 100))
    assert ("d1", "d0") in found


# --------------------------------------------------------------------------- many devices


def alike(count: int) -> Cluster:
    """Eight devices a host, and faster links within it."""
    devices = tuple(
        Device(f"g{i}", f"h{i // 8}", "cuda", 80 << 30, 1e14, 1e12) for i in range(count)
    )
    near = Link(3e-6, 3e11)
    pairs = ((a, b) for a in devices for b in devices if a.host == b.host and a.name < b.name)
    return Cluster(devices, Link(5e-6, 2e10), tuple((a.name, b.name, near) for a, b in pairs))


def slower(cluster: Cluster, hosts: set[str]) -> Cluster:
    devices = (
        replace(d, flops_per_s=d.flops_per_s / 2) if d.host in hosts else d for d in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def test_all_are_looked_at_where_they_are_not_too_many() -> None:
    cluster = alike(264)
    assert looked_at(cluster) is cluster
    assert not of_how_many(cluster)


def test_of_more_it_is_the_fastest_hosts_with_their_links() -> None:
    cluster = slower(alike(264), {"h3"})
    found = looked_at(cluster, 256)
    assert {d.host for d in cluster.devices} - {d.host for d in found.devices} == {"h3"}
    assert found.link("g0", "g1") == cluster.link("g0", "g1")
    assert of_how_many(cluster, 256) == "on 256 of 264 devices"


def test_the_order_of_the_cluster_file_does_not_count() -> None:
    cluster = slower(alike(264), {"h3", "h4"})
    devices = list(cluster.devices)
    random.Random(1).shuffle(devices)
    other = replace(cluster, devices=tuple(devices))
    assert set(looked_at(other, 256).devices) == set(looked_at(cluster, 256).devices)


@pytest.mark.nightly
def test_a_pipeline_is_searched_on_all_of_many_devices() -> None:
    """No recursion is as deep as there are devices: Python's own limit is 1,000."""
    alone = Cluster(tuple(replace(d, host="h") for d in alike(1008).devices), Link(5e-6, 2e10))
    assert len(max(device_orders(alone, 2000), key=len)) == 1008
    options = Options("auto", tensor=1, effort="fast")
    plan = make_plan(chain_graph(0, 12, skips=False), alike(264), Source("m.py"), options)
    assert plan.search is not None
    assert "264 devices" not in plan.search.bounds[0].covers
