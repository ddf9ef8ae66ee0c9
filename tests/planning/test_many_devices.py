"""Which devices a search looks at where there are more than it can."""

from __future__ import annotations

import random
from dataclasses import replace

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import looked_at, of_how_many
from tools.bench_auto import a100s


def slower(cluster: Cluster, hosts: set[str]) -> Cluster:
    devices = (
        replace(d, flops_per_s=d.flops_per_s / 2) if d.host in hosts else d for d in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def test_all_are_looked_at_where_they_are_not_too_many() -> None:
    cluster = a100s(256)
    assert looked_at(cluster) is cluster
    assert not of_how_many(cluster)


def test_of_more_it_is_the_fastest_hosts_with_their_links() -> None:
    cluster = slower(a100s(264), {"h3"})
    found = looked_at(cluster)
    assert {d.host for d in cluster.devices} - {d.host for d in found.devices} == {"h3"}
    assert found.link("g0", "g1") == cluster.link("g0", "g1")
    assert of_how_many(cluster) == "on 256 of 264 devices"


def test_the_order_of_the_cluster_file_does_not_count() -> None:
    cluster = slower(a100s(264), {"h3", "h4"})
    devices = list(cluster.devices)
    random.Random(1).shuffle(devices)
    other = replace(cluster, devices=tuple(devices))
    assert set(looked_at(other).devices) == set(looked_at(cluster).devices)
