"""Many devices -> those that one pipeline is searched on: the hosts of the fastest first.

A pipeline has no more stages than a model has units that are worth a device, and what a search
takes grows faster than the devices do. Who is left out is said (`of_how_many`), and bounds are of
the devices that were looked at. It knows no graph.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning.device_kinds import by_hosts

MOST_DEVICES = 1024


def looked_at(cluster: Cluster, most: int = MOST_DEVICES) -> Cluster:
    """Return the devices that a search looks at, in the order of the cluster: all, if not too many.

    Hosts go by their devices' rates, then by name; of the last one it may be some devices only.
    """
    if len(cluster.devices) <= most:
        return cluster
    taken = {device.name for device in by_hosts(cluster)[:most]}
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in taken),
        links=tuple((a, b, link) for a, b, link in cluster.links if {a, b} <= taken),
        stores=tuple(store for store in cluster.stores if store.device in taken),
        replicas=(),
    )


def of_how_many(cluster: Cluster, most: int = MOST_DEVICES) -> str:
    """Say how many devices are looked at, of how many; nothing where that is all."""
    count = len(cluster.devices)
    return "" if count <= most else f"on {most:,} of {count:,} devices"
