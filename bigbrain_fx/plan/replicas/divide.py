"""Cluster, how many -> the devices of each replica, and what of the cluster they see.

    a a b b     two replicas of the same mix: [a b] [a b]; three kinds of speeds that do not divide:
    a b c       the fastest first, each to who has least: [a] [b c]

This file knows devices; it knows no model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning import nameless, near_first

Group = tuple[str, ...]
FEW = 6
"""Unlike devices of which every number of replicas is worth a try."""


def numbers(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of replicas that are worth a try: where all get as many devices.

    Of few unlike ones every number: two slow ones may be a replica beside a fast one.
    """
    count = len(cluster.devices)
    is_any = count <= FEW and len(set(map(nameless, cluster.devices))) > 1
    return tuple(n for n in range(1, count + 1) if is_any or count % n == 0)


def divide(cluster: Cluster, count: int, members: int = 1) -> tuple[Group, ...]:
    """Divide a cluster's devices among so many replicas, those that are near each other together.

    Where they compute in groups of so many members, each replica has whole groups, if it can be.

    Raises:
        InputError: there are fewer devices, or the cluster file names other replicas.
    """
    if cluster.replicas:
        return _named(cluster, count)
    if not 1 <= count <= len(cluster.devices):
        raise InputError(
            f"{count} replicas need as many devices at least, and the cluster has "
            f"{len(cluster.devices)}",
            code="BX1278",
            help=f"--replicas {len(cluster.devices)}, or fewer",
        )
    near, every = near_first(cluster), len(cluster.devices)
    kinds: dict[Device, list[str]] = {}
    for device in near:
        kinds.setdefault(nameless(device), []).append(device.name)
    alike = all(len(names) % count == 0 for names in kinds.values())
    groups = _mixed(kinds.values(), count) if alike else _balanced(near, count)
    if any(len(group) % members for group in groups) and every % (count * members) == 0:
        groups = _balanced(near, count, every // count)
    place = {device.name: i for i, device in enumerate(cluster.devices)}
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)


def with_replica_of(
    cluster: Cluster, count: int, members: int, used: Collection[str]
) -> tuple[Group, Cluster]:
    """Return the replica that has some devices, and the cluster with the devices of all replicas.

    Where they are of several, but as many as a replica has, they are one, and the others are made
    of the rest.

    Raises:
        InputError: no replica has them all, or replicas have not as many devices each.
    """
    groups = divide(cluster, count, members)
    found = next((group for group in groups if set(used) <= set(group)), None)
    if found is None and not cluster.replicas and len(used) * count == len(cluster.devices):
        found = tuple(name for name in cluster.device if name in used)
        rest = only(cluster, cluster.device.keys() - found)
        groups = (found, *divide(rest, count - 1, members))
    if found is None or len({len(group) for group in groups}) > 1:
        listed = "; ".join(f"replica {i}: {', '.join(group)}" for i, group in enumerate(groups))
        raise InputError(
            f"what is placed by hand is one replica of several alike, and {', '.join(used)} are of "
            "several, or of one that has more devices than another",
            code="BX1242",
            notes=(listed,),
            help='use the devices of one replica, or name those of each under "replicas" in the '
            "cluster file, as many for each",
        )
    return found, replace(cluster, replicas=groups)


def _named(cluster: Cluster, count: int) -> tuple[Group, ...]:
    if len(cluster.replicas) != count:
        raise InputError(
            f"the cluster file names {len(cluster.replicas)} replicas, not {count}",
            code="BX1279",
            help=f'--replicas {len(cluster.replicas)}, or take "replicas" out of the cluster file',
        )
    return cluster.replicas


def _mixed(kinds: Iterable[list[str]], count: int) -> list[list[str]]:
    """Give each replica as many of every kind, neighbours together."""
    groups: list[list[str]] = [[] for _ in range(count)]
    for names in kinds:
        size = len(names) // count
        for number, group in enumerate(groups):
            group += names[number * size : (number + 1) * size]
    return groups


def _balanced(devices: Sequence[Device], count: int, most: int | None = None) -> list[list[str]]:
    """Give the fastest first to who has least, and to nobody more than so many."""
    groups: list[list[str]] = [[] for _ in range(count)]
    speeds = [0.0] * count
    for device in sorted(devices, key=lambda device: -device.flops_per_s):
        with_room = (i for i in range(count) if most is None or len(groups[i]) < most)
        least = min(with_room, key=speeds.__getitem__)
        groups[least].append(device.name)
        speeds[least] += device.flops_per_s
    order = {device.name: i for i, device in enumerate(devices)}
    return sorted(groups, key=lambda group: min(map(order.__getitem__, group)))


def only(cluster: Cluster, group: Iterable[str]) -> Cluster:
    """Return the cluster as some devices see it, of one replica, say: they and their links."""
    inside = set(group)
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in inside),
        links=tuple((a, b, link) for a, b, link in cluster.links if {a, b} <= inside),
        replicas=(),
    )


def likeness(cluster: Cluster) -> tuple[object, ...]:
    """Return what two clusters have in common that are alike but for names: a plan serves both."""
    hosts = list(dict.fromkeys(device.host for device in cluster.devices))
    shared = {host.name: replace(host, name="") for host in cluster.hosts}
    stores = {each.device: replace(each, name="", device="") for each in cluster.stores}
    devices = tuple(
        (nameless(d), hosts.index(d.host), shared.get(d.host), stores.get(d.name))
        for d in cluster.devices
    )
    return devices, cluster.default_link, tuple(_other_links(cluster))


def _other_links(cluster: Cluster) -> Iterator[tuple[int, int, Link]]:
    """Yield the links that are not as most are, by the places of their ends."""
    place = {device.name: i for i, device in enumerate(cluster.devices)}
    named = {(place[a], place[b]): (a, b) for a, b, _ in cluster.links if {a, b} <= place.keys()}
    ways = {
        way: ends
        for (i, j), (a, b) in named.items()
        for way, ends in (((i, j), (a, b)), ((j, i), (b, a)))
    }
    for (i, j), (a, b) in sorted(ways.items()):
        link = cluster.link(a, b)
        if link != cluster.default_link:
            yield i, j, link
