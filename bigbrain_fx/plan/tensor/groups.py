"""Cluster, how many -> groups of devices that compute together, and columns: a rank of each.

    d0 d1 | d2 d3      groups of two; column 0 is d0 d2, column 1 is d1 d3

This file knows devices; it knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.shard import lengths
from bigbrain_fx.planning import nameless, near_first

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


# ------------------------------------------------------------------------------------------------
# Cluster, speeds -> ways to group its devices that are worth a try, with the ranks' shares.
#
#   4 4 2 2     alike      [4 4] [2 2]    1:1, each group of devices of one kind
#               dealt      [4 2] [4 2]    2:1, each group with as many of the fast and the slow
#               fastest    [4 4 2]        2:2:1, one group, the others left out
#               nearest    [4 4]          1:1, one group, of those with the quickest links
#
# Ranks are on one host and have as many threads, so that what is not divided rounds alike on
# each.


_NEAR, _MOST = 0.02, 12
"""How near shares come to speeds, and the parts a member that may be needed for it."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of as many devices each, and how the ranks of each share what is divided."""

    groups: Groups
    shares: tuple[int, ...]

    @property
    def members(self) -> int:
        """How many devices a group has."""
        return len(self.shares)

    @property
    def devices(self) -> frozenset[str]:
        """All that are in a group."""
        return frozenset(name for group in self.groups for name in group)

    def __str__(self) -> str:
        shares = (
            f" in shares {':'.join(map(str, self.shares))}" if len(set(self.shares)) > 1 else ""
        )
        count = len(self.groups)
        return f"{count} tensor group{'s' * (count > 1)} of {self.members} devices{shares}"


def groupings(cluster: Cluster, speeds: Mapping[str, float], most: int) -> tuple[Grouping, ...]:
    """Return every grouping worth a try, each once."""
    pools = [pool for pool in _pools(cluster, speeds) if len(pool) > 1]
    found: dict[Grouping, None] = {}
    for members in range(2, min(most, max(map(len, pools), default=1)) + 1):
        wide = [pool for pool in pools if len(pool) >= members]
        kinds = [[(nameless(device), speeds[device.name]) for device in pool] for pool in wide]
        about = wide, kinds, members
        one_each = _fastest(*about), _nearest(cluster, wide, members)
        for groups in (_alike(*about), _dealt(*about), *one_each):
            if groups:
                found[_shared(groups, speeds)] = None
    firsts: dict[object, Grouping] = {}
    for each in found:
        firsts.setdefault(_likeness(cluster, speeds, each), each)
    return tuple(firsts.values())


def _likeness(cluster: Cluster, speeds: Mapping[str, float], grouping: Grouping) -> object:
    """Return what groupings have in common that are alike but for names."""
    kinds = [
        tuple((nameless(d), d.host, speeds[d.name]) for d in map(cluster.device.__getitem__, group))
        for group in grouping.groups
    ]
    if not cluster.links:
        return grouping.shares, tuple(sorted(kinds, key=repr))
    names = [name for group in grouping.groups for name in group]
    links = tuple(cluster.link(a, b) for a, b in combinations(names, 2))
    return grouping.shares, tuple(kinds), links


def _pools(cluster: Cluster, speeds: Mapping[str, float]) -> Iterator[list[Device]]:
    """Yield devices that may be one group, the fastest first."""
    pools: dict[tuple[str, int], list[Device]] = {}
    for device in near_first(cluster):
        pools.setdefault((device.host, device.threads), []).append(device)
    for pool in pools.values():
        yield sorted(pool, key=lambda device: -speeds[device.name])


_Kind: TypeAlias = tuple[Device, float]
"""A device without its names, and its speed."""


def _alike(
    pools: Sequence[Sequence[Device]], kinds: Sequence[Sequence[_Kind]], members: int
) -> list[tuple[str, ...]]:
    """Group devices of one kind where they divide; of kinds that do not, nobody."""
    every: dict[tuple[str, _Kind], list[str]] = {}
    for pool, own in zip(pools, kinds, strict=True):
        for device, kind in zip(pool, own, strict=True):
            every.setdefault((device.host, kind), []).append(device.name)
    return [
        tuple(names[i : i + members])
        for names in every.values()
        if len(names) % members == 0
        for i in range(0, len(names), members)
    ]


def _dealt(
    pools: Sequence[Sequence[Device]], kinds: Sequence[Sequence[_Kind]], members: int
) -> list[tuple[str, ...]]:
    """Group so that each group has as fast a first rank, second rank, and so on."""
    if all(len(set(own)) == 1 for own in kinds):
        return []  # these are `_alike`
    found = []
    for pool, own in zip(pools, kinds, strict=True):
        count = len(pool) // members
        if not (len(set(own)) == 1 and len(pool) % members):
            found += [tuple(pool[m * count + i].name for m in range(members)) for i in range(count)]
    return found


def _fastest(
    pools: Sequence[Sequence[Device]], kinds: Sequence[Sequence[_Kind]], members: int
) -> list[tuple[str, ...]]:
    """Make one group of the fastest devices of each host that has unlike ones."""
    unlike = [pool for pool, own in zip(pools, kinds, strict=True) if len(set(own)) > 1]
    return [tuple(device.name for device in pool[:members]) for pool in unlike]


def _nearest(
    cluster: Cluster, pools: Sequence[Sequence[Device]], members: int
) -> list[tuple[str, ...]]:
    """Make one group on each host, of the devices whose slowest link is the quickest."""
    if not cluster.links:
        return []
    found = []
    for pool in pools:
        names = [device.name for device in pool]
        rows = [tuple(names[i : i + members]) for i in range(len(names) - members + 1)]
        found.append(max(rows, key=lambda row: _slowest(cluster, row)))
    return found


def _slowest(cluster: Cluster, names: Sequence[str]) -> float:
    return min(cluster.link(a, b).bytes_per_s for a, b in permutations(names, 2))


def _shared(groups: Sequence[Sequence[str]], speeds: Mapping[str, float]) -> Grouping:
    """Return a grouping with shares by the speeds of first ranks, second ranks, and so on."""
    columns = list(zip(*groups, strict=True))
    every = [sum(speeds[name] for name in column) for column in columns]
    return Grouping(tuple(map(tuple, groups)), shares_of(every))


def shares_of(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers that are as speeds are, each within `_NEAR` of it."""
    whole = sum(speeds)
    for total in range(len(speeds), _MOST * len(speeds) + 1):
        parts = lengths(total, speeds)
        if all(abs(p / total * whole / s - 1) <= _NEAR for p, s in zip(parts, speeds, strict=True)):
            break
    return parts
