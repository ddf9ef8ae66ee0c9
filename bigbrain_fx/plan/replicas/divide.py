"""Cluster, how many -> the devices of each replica, and what of the cluster they see.

    a a b b     two replicas of the same mix: [a b] [a b]; three kinds of speeds that do not divide:
    a b c       the fastest first, each to who has least: [a] [b c]

    shares 3:1 of 8 micro-batches   neighbours   0 1 2 3 4 5 | 6 7     few parts of a tree
                                    in turn      0 1 2 4 5 6 | 3 7     nobody waits long

With --shard-group 2 four replicas divide ZeRO's state in groups: 0 1 | 2 3. This file knows
devices and numbers; it knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replica_cut import BUCKETS
from bigbrain_fx.plan.schedule import traits
from bigbrain_fx.planning import nameless, near_first

Group = tuple[str, ...]
FEW = 6
"""Unlike devices of which every number of replicas is worth a try."""


def numbers(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of replicas that are worth a try: where all get as many devices.

    Of few different devices every number: two slow ones may be a replica beside a fast one.
    """
    count = len(cluster.devices)
    is_any = count <= FEW and len(set(map(nameless, cluster.devices))) > 1
    return tuple(n for n in range(1, count + 1) if is_any or count % n == 0)


def divide(cluster: Cluster, count: int, members: int = 1) -> tuple[Group, ...]:
    """Divide a cluster's devices among so many replicas, neighbouring devices together.

    Where devices compute in groups of so many ranks, each replica has whole groups, if possible.

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

    Devices of several replicas, but as many as one replica has, become one replica. The other
    replicas are made of the remaining devices.

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
    """Return what two clusters that differ in names only have in common: a plan serves both."""
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


# ------------------------------------------------------------- groups that divide what ZeRO divides


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
            help=_other_groups(count),
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
            help=_other_groups(len(groups)),
        )
    return size


def _other_groups(count: int) -> str:
    numbers = [n for n in range(2, count) if count % n == 0]
    use = f"use --shard-group {' or '.join(map(str, numbers))}, or " if numbers else ""
    return f"{use}leave --shard-group out"


# --------------------------------------------------------------------------- how many


MOST_MESSAGES = 2_000_000
"""Of a step, for sums: more would fill the memory of who plans, and of who runs it."""


def replica_count(cluster: Cluster, options: Options) -> int:
    """Return how many replicas were asked for, by option or by the cluster file; 1: none."""
    return options.replicas or len(options.replica_shares) or len(cluster.replicas) or 1


def require_room_to_fold(options: Options, groups: Sequence[Sequence[str]]) -> None:
    """Refuse a schedule that folds a line of devices where a replica has but one of them.

    Args:
        options: of all replicas.
        groups: the devices of each.
    """
    single = [own for own in groups if len(own) == (options.tensor or 1)]
    if traits(options.schedule).fold and len(groups) > 1 and single:
        what = "device" if len(single[0]) == 1 else "tensor group"
        raise InputError(
            f"schedule '{options.schedule}' goes over several {what}s, and {len(single)} of "
            f"{len(groups)} replicas {'has' if len(single) == 1 else 'have'} one",
            code="BX1295",
            at="--schedule",
            help="leave --replicas out, use --schedule 1f1b, or a cluster of more devices",
        )


def has_many_messages(replicas: int) -> bool:
    """Whether so many replicas are too many for a bundle."""
    return _messages(replicas) > MOST_MESSAGES


def require_few_messages(replicas: int) -> None:
    """Refuse replicas whose sums a plan could not list.

    Raises:
        InputError: says how many there may be.
    """
    if not has_many_messages(replicas):
        return
    most = next(n for n in range(replicas, 0, -1) if not has_many_messages(n))
    raise InputError(
        f"{replicas:,} replicas that each send to each other are {_messages(replicas):,} messages "
        f"a step for one stage alone, and a plan has at most {MOST_MESSAGES:,}",
        code="BX1283",
        at="--replicas",
        help=f"use at most --replicas {most}, each of several devices",
    )


def _messages(replicas: int) -> int:
    return 2 * BUCKETS * replicas * (replicas - 1)


# --------------------------------------------------------------------------- micro-batches of each


def asked(count: int, shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """Return how many of `count` micro-batches each replica has, in exactly these shares.

    Args:
        count: of a step.
        shares: of each replica.
        batch: rows of a step, which the number of micro-batches divides.

    Raises:
        InputError: they do not divide so.
    """
    whole = sum(shares)
    if count % whole:
        listed = ":".join(map(str, shares))
        raise InputError(
            f"{count} micro-batches cannot be shared {listed}: {whole} does not divide {count}",
            code="BX1290",
            at="--replica-ratio",
            help=_instead(count, shares, batch),
        )
    return tuple(share * count // whole for share in shares)


def _instead(count: int, shares: Sequence[int], batch: int) -> str:
    """Return what can be shared so: the nearest number of micro-batches, else other shares."""
    whole, replicas = sum(shares), len(shares)
    numbers = [n for n in range(whole, batch + 1, whole) if batch % n == 0]
    if numbers:
        return f"--micro-batches {min(numbers, key=lambda n: abs(n - count))}"
    return (
        f"no number of micro-batches that divides the batch of {batch} is divided by {whole}: use "
        f"shares whose sum divides {batch}, or another batch"
        + (f"; or --replicas {replicas} alone, which shares any" if len(set(shares)) == 1 else "")
    )


def by_speed(count: int, speeds: Sequence[float], starts: Sequence[float] = ()) -> tuple[int, ...]:
    """Return how many micro-batches each replica has so that the last is done soonest.

    Each has one at least; the next goes to who would be done with it first.

    Args:
        count: of all replicas.
        speeds: micro-batches a second of each.
        starts: seconds of each besides: until its pipeline is filled; (): none.

    Source: D'Hondt's method, which minimises the largest count over speed.
    """
    found = [1] * len(speeds)
    before = starts or [0.0] * len(speeds)
    done = [(before[i] + 2 / speed, i) for i, speed in enumerate(speeds)]
    heapify(done)
    for _ in range(count - len(speeds)):
        _, first = done[0]
        found[first] += 1
        heapreplace(done, (before[first] + (found[first] + 1) / speeds[first], first))
    return tuple(found)


WORTH = 0.99
"""Of the slowest replica's step: what another may take that has one of its micro-batches more."""


def evened(
    shares: tuple[int, ...], seconds: Callable[[int, int], tuple[float, float]]
) -> tuple[int, ...]:
    """Return shares of which the slowest replica gave micro-batches on while that was faster.

    A pipeline takes less than twice as long for twice as many.

    Args:
        shares: micro-batches of each replica.
        seconds: a replica's step of so many, and the least that one more would add to it.
    """
    numbers = range(len(shares))
    for _ in range(sum(shares)):
        steps_s, adds_s = zip(*(seconds(i, shares[i]) for i in numbers), strict=True)
        more_s = [step_s + add_s for step_s, add_s in zip(steps_s, adds_s, strict=True)]
        last = max(numbers, key=steps_s.__getitem__)
        first = min(numbers, key=more_s.__getitem__)
        given = tuple(n + (i == first) - (i == last) for i, n in enumerate(shares))
        most_s = WORTH * steps_s[last]
        if more_s[first] >= most_s or not all(given):
            return shares
        if seconds(first, given[first])[0] >= most_s:
            return shares
        shares = given
    return shares


def numbered(counts: Sequence[int], *, in_turn: bool) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each replica's micro-batches, ascending."""
    total = sum(counts)
    if not in_turn:
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return tuple(tuple(range(end - n, end)) for end, n in zip(ends, counts, strict=True))
    turns = sorted((((k + 0.5) / n), i) for i, n in enumerate(counts) for k in range(n))
    assert len(turns) == total
    return tuple(
        tuple(micro for micro, (_, who) in enumerate(turns) if who == i) for i in range(len(counts))
    )
