"""The orders that are tried: of units, and of devices along a pipeline. No times, no splits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bigbrain_fx.core import Cluster, Device, Link


def unit_orders(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return different topological orders of units 0 .. count-1; the given one is the first.

    Depth first finishes a branch before it begins the next; "late" runs each unit as shortly
    before its readers as it can.
    """
    pairs = sorted(set(edges))
    backward = [(reader, maker) for maker, reader in pairs]
    late = tuple(reversed(_depth_first(count, backward, range(count))))
    early = _depth_first(count, pairs, range(count)[::-1])
    return tuple(dict.fromkeys((tuple(range(count)), early, late)))


def _depth_first(
    count: int, edges: Iterable[tuple[int, int]], starts: Iterable[int]
) -> tuple[int, ...]:
    waiting = [0] * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for maker, reader in edges:
        waiting[reader] += 1
        readers[maker].append(reader)
    ready = [unit for unit in starts if waiting[unit] == 0]
    order: list[int] = []
    while ready:
        unit = ready.pop()
        order.append(unit)
        for reader in reversed(readers[unit]):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return tuple(order)


def device_orders(cluster: Cluster, most: int) -> tuple[tuple[str, ...], ...]:
    """Return orders of subsets of the devices, those with most devices first.

    All of them, where devices that could change places without a difference count as one; if they
    are more than `most`, the given order and orders by speed, memory and host, their mirror images,
    and the beginnings of each.
    """
    every: list[tuple[str, ...]] = []
    for order in _distinct(cluster):
        every.append(order)
        if len(every) > most:
            every = list(_sorted_orders(cluster, most))
            break
    return tuple(sorted(every, key=len, reverse=True))  # stable: the given order stays in front


def _distinct(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    kinds = kinds_of(cluster)
    names = [device.name for device in cluster.devices]

    def extend(taken: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
        if taken:
            yield tuple(names[i] for i in taken)
        seen: set[int] = set()
        for i, kind in enumerate(kinds):
            if i not in taken and kind not in seen:
                seen.add(kind)
                yield from extend((*taken, i))

    return extend(())


def kinds_of(cluster: Cluster) -> list[int]:
    """Return, for each device, the first that it could change places with."""
    links = [_links(cluster, device) for device in cluster.devices]
    found: list[int] = []
    for i in range(len(links)):
        same = (j for j in range(i) if found[j] == j and _swappable(cluster, j, i, links))
        found.append(next(same, i))
    return found


def _links(cluster: Cluster, device: Device) -> list[Link]:
    return [cluster.link(device.name, other.name) for other in cluster.devices]


def _swappable(cluster: Cluster, a: int, b: int, links: Sequence[Sequence[Link]]) -> bool:
    if rates(cluster.devices[a]) != rates(cluster.devices[b]):
        return False
    if cluster.has_shared_nics and cluster.devices[a].host != cluster.devices[b].host:
        return False
    others = (i for i in range(len(links)) if i not in (a, b))
    return all(links[a][i] == links[b][i] for i in others)


def rates(device: Device) -> tuple[object, ...]:
    """Return all of a device but its name and its host."""
    return (
        device.kind,
        device.memory_bytes,
        device.flops_per_s,
        device.memory_bytes_per_s,
        device.launch_s,
        device.threads,
        device.overheads,
    )


def _sorted_orders(cluster: Cluster, most: int) -> Iterator[tuple[str, ...]]:
    given = cluster.devices
    orders: list[Sequence[Device]] = [
        given,
        sorted(given, key=lambda d: -d.flops_per_s),
        sorted(given, key=lambda d: d.flops_per_s),
        sorted(given, key=lambda d: -d.memory_bytes),
        sorted(given, key=lambda d: d.memory_bytes),
        sorted(given, key=lambda d: d.host),
    ]
    names = tuple(dict.fromkeys(tuple(d.name for d in order) for order in orders))
    lengths = _lengths(len(given), max(1, min(most, 96) // len(names)))
    yield from dict.fromkeys(order[:length] for length in lengths for order in names)


def _lengths(count: int, most: int) -> list[int]:
    """Return how many devices to try: all, then fewer, at most `most` numbers; 1 always."""
    step = max(1, -(-count // most))
    return [*range(count, 1, -step), 1]
