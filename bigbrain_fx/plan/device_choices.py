"""Cluster -> the sets of devices that one may rent, each once: of devices alike only how many.

    2 of card A in zone eu, 1 of card B in zone us   ->   A, AA, B, AB, AAB

Devices of one kind are taken host by host, so that few hosts are used. It prices nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import nameless, near_first

Names = tuple[str, ...]
MOST = 4_096
"""Sets that are looked at; of clusters with more, few counts of each kind."""


def device_choices(cluster: Cluster) -> list[Names]:
    """Return every set of devices that may be worth renting, in the cluster's order.

    Where the cluster file names replicas, all devices are the only set.
    """
    every = tuple(device.name for device in cluster.devices)
    if cluster.replicas:
        return [every]
    kinds = kinds_of(cluster)
    place = {name: i for i, name in enumerate(every)}
    found = []
    for counts in product(*_counts(kinds)):
        taken = [n for names, count in zip(kinds, counts, strict=True) for n in names[:count]]
        if taken:
            found.append(tuple(sorted(taken, key=place.__getitem__)))
    return found


def kinds_of(cluster: Cluster) -> list[Names]:
    """Return the devices of each zone, card and price, those of one host together."""
    kinds: dict[object, list[str]] = {}
    nics = {host.name: (host.nic_bytes_per_s, host.memory_bytes_per_s) for host in cluster.hosts}
    for device in near_first(cluster):
        zone, price = cluster.zone.get(device.name), cluster.price.get(device.name)
        key = zone, price, nics.get(device.host), nameless(device)
        kinds.setdefault(key, []).append(device.name)
    host = {device.name: device.host for device in cluster.devices}
    return [_by_host(names, host) for names in kinds.values()]


def _by_host(names: Sequence[str], host: dict[str, str]) -> Names:
    """Return names with the fullest host first, and those of a host together."""
    on: dict[str, list[str]] = {}
    for name in names:
        on.setdefault(host[name], []).append(name)
    return tuple(name for own in sorted(on.values(), key=len, reverse=True) for name in own)


def _counts(kinds: Sequence[Names]) -> list[list[int]]:
    """Return how many of each kind to take: any number, powers of two, or all and none."""
    sizes = [len(names) for names in kinds]
    every = [list(range(size + 1)) for size in sizes]
    powers = [sorted({0, size, *(2**n for n in range(size.bit_length()))}) for size in sizes]
    for found in (every, powers):
        if prod(map(len, found)) <= MOST:
            return found
    return [[0, size] for size in sizes]
