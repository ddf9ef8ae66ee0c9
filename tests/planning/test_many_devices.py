"""Which devices a search looks at where there are more than it can."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.planning import looked_at, of_how_many
from tests.support.rough import device_orders
from tests.support.synthetic import chain_graph


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
