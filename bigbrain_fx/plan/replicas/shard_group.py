"""Options -> how many replicas divide what ZeRO divides; groups of them are copies of each other.

    --replicas 4 --zero 1 --shard-group 2     replicas 0 1 | 2 3: each group has all of the state

This file knows devices and hosts; it knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replicas.divide import Group


def shard_group(cluster: Cluster, options: Options, groups: Sequence[Group]) -> int:
    """Return how many replicas that follow each other divide the state; 0: all.

    Args:
        cluster: all devices.
        options: of all replicas.
        groups: the devices of each.

    Raises:
        InputError: the replicas are not divided evenly so, or not by hosts.
    """
    asked, count = options.shard_group, len(groups)
    if asked is None:
        return 0
    found = _on_one_host(cluster, groups) if asked == "host" else int(asked)
    if found < 2 or count % found:
        raise InputError(
            f"--shard-group {found} divides ZeRO's shards among {found} replicas, and there are "
            f"{count}",
            code="BX1350",
            at="--shard-group",
            help=_instead(count),
        )
    return found if found < count else 0


def _on_one_host(cluster: Cluster, groups: Sequence[Group]) -> int:
    """Return how many replicas each host has."""
    hosts = [frozenset(cluster.device[name].host for name in group) for group in groups]
    size = hosts.count(hosts[0])
    is_even = size > 1 and len(hosts) % size == 0 and all(len(own) == 1 for own in hosts)
    if not is_even or any(len({*hosts[i : i + size]}) > 1 for i in range(0, len(hosts), size)):
        listed = (f"replica {i}: {', '.join(sorted(own))}" for i, own in enumerate(hosts))
        raise InputError(
            "--shard-group host needs the same number of replicas on every host, two at least, and "
            "none of several hosts",
            code="BX1351",
            at="--shard-group",
            notes=("; ".join(listed),),
            help=_instead(len(groups)),
        )
    return size


def _instead(count: int) -> str:
    numbers = [n for n in range(2, count) if count % n == 0]
    use = f"use --shard-group {' or '.join(map(str, numbers))}, or " if numbers else ""
    return f"{use}leave --shard-group out"
