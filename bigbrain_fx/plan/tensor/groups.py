"""Cluster, how many -> groups of devices that compute together, and columns: a rank of each.

    d0 d1 | d2 d3      groups of two; column 0 is d0 d2, column 1 is d1 d3

This file knows devices; it knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.errors import InputError

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def grouped(cluster: Cluster, members: int) -> Groups:
    """Group a cluster's devices, neighbours of the file together.

    Each rank computes what is not divided, so all must round identically. They need as many threads
    each, and one host or hosts that name no other processors; GPUs must be the same card. A run
    compares what they have then (`runtime.copies`).

    Raises:
        InputError: a group's devices would not.
    """
    names = list(cluster.device)
    groups = tuple(tuple(names[i : i + members]) for i in range(0, len(names), members))
    for group in groups:
        _require_alike(cluster, group)
    return groups


def _require_alike(cluster: Cluster, group: Sequence[str]) -> None:
    first = cluster.device[group[0]]
    for other in (cluster.device[name] for name in group[1:]):
        for what, a, b in _unlike(first, other):
            raise InputError(
                f"{first.name} and {other.name} would be one group, and have other {what} "
                f"({a} and {b}): what is not divided would round otherwise on each, and "
                "their copies drift apart",
                code="BX1339",
                at="--tensor-parallel",
                help="list devices of one host or of equal processors, with as many threads, one "
                "after the other in the cluster file",
            )


def _unlike(first: Device, other: Device) -> Iterator[tuple[str, object, object]]:
    if first.kind != other.kind:
        yield "kinds", first.kind, other.kind
    if first.threads != other.threads:
        yield "threads", first.threads, other.threads
    if first.host == other.host and first.kind == "cpu":
        return  # an emulated device has a name of its own
    yield from _other_names("processors", first.processor, other.processor)
    yield from _other_names("cards", first.preset, other.preset)


def _other_names(what: str, first: str, other: str) -> Iterator[tuple[str, object, object]]:
    if first and other and first != other:
        yield what, first, other


def column(cluster: Cluster, groups: Sequence[Sequence[str]], member: int) -> Cluster:
    """Return what one rank of each group sees of a cluster, in the order of the groups.

    All columns send at the same time: each has of a host's NIC what its devices there are of those
    in groups.
    """
    own = {group[member] for group in groups}
    used = Counter(cluster.device[name].host for group in groups for name in group)
    mine = Counter(cluster.device[name].host for name in own)
    left = _with_nics(cluster, {host: mine[host] / used[host] for host in mine})
    return replace(
        left,
        devices=tuple(cluster.device[group[member]] for group in groups),
        links=tuple(link for link in cluster.links if {link[0], link[1]} <= own),
        replicas=(),
    )


def seen_by(cluster: Cluster, groups: Sequence[Sequence[str]], group: Sequence[str]) -> Cluster:
    """Return a cluster as the exchanges of one group see it.

    Groups over several hosts exchange at the same time: each has of a host's NIC what its ranks
    there are of all such groups'.
    """
    if not cluster.has_shared_nics:
        return cluster

    def hosts_of(members: Sequence[str]) -> Counter[str]:
        found = Counter(cluster.device[name].host for name in members)
        return found if len(found) > 1 else Counter()

    used: Counter[str] = Counter()
    for other in groups:
        used += hosts_of(other)
    mine = hosts_of(group)
    return _with_nics(cluster, {host: mine[host] / used[host] for host in mine})


def _with_nics(cluster: Cluster, shares: Mapping[str, float]) -> Cluster:
    """Return a cluster whose hosts have such a share of their NICs; others all of theirs."""
    return replace(
        cluster,
        hosts=tuple(
            host
            if host.nic_bytes_per_s is None or host.name not in shares
            else replace(host, nic_bytes_per_s=host.nic_bytes_per_s * shares[host.name])
            for host in cluster.hosts
        ),
    )
