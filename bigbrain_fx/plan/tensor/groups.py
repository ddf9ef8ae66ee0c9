"""Cluster, how many -> groups of devices that compute together, and columns: a member of each.

    d0 d1 | d2 d3      groups of two; column 0 is d0 d2, column 1 is d1 d3

This file knows devices; it knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def grouped(cluster: Cluster, members: int) -> Groups:
    """Group a cluster's devices, neighbours of the file together.

    Members compute what is not divided for themselves, so they must round alike: on one host, with
    as many threads.

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
        for what, a, b in (
            ("hosts", first.host, other.host),
            ("threads", first.threads, other.threads),
        ):
            if a != b:
                raise InputError(
                    f"{first.name} and {other.name} would be one group, and have other {what} "
                    f"({a} and {b}): what is not divided would round otherwise on each, and "
                    "their copies drift apart",
                    at="--tensor",
                    help="list devices of one host, with as many threads, one after the other in "
                    "the cluster file",
                )


def column(cluster: Cluster, groups: Sequence[Sequence[str]], member: int) -> Cluster:
    """Return what one member of each group sees of a cluster.

    All columns send at the same time: of a host's NIC, on which its groups are whole, each has an
    equal part.
    """
    own = {group[member] for group in groups}
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in own),
        links=tuple(link for link in cluster.links if {link[0], link[1]} <= own),
        replicas=(),
        hosts=tuple(
            host
            if host.nic_bytes_per_s is None
            else replace(host, nic_bytes_per_s=host.nic_bytes_per_s / len(groups[0]))
            for host in cluster.hosts
        ),
    )
