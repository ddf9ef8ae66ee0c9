"""The orders a pipeline may be tried in: topological orders of units, and sequences of devices.

It knows edges and devices; it knows no times and no method. Who asks says how many orders are too
many, and in what devices are unlike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from bigbrain_fx.core import Cluster, Device


def unit_orders(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return different topological orders of units 0 .. count-1; the given order is the first.

    Depth first finishes a branch before it begins the next, so that fewer values cross a cut;
    "late" runs every unit as shortly before its readers as it can (depth first from the end).

    Args:
        count: how many units, numbered in a topological order.
        edges: pairs (maker, reader).
    """
    pairs = sorted(set(edges))
    backward = [(reader, maker) for maker, reader in pairs]
    late = tuple(reversed(_depth_first(count, backward, range(count))))
    early = _depth_first(count, pairs, range(count)[::-1])
    return tuple(dict.fromkeys((tuple(range(count)), early, late)))


def random_orders(count: int, edges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Yield topological orders without end, each depth first from one end or the other; seeded."""
    dice = random.Random(0)
    pairs = sorted(set(edges))
    starts = list(range(count))
    while True:
        dice.shuffle(starts)
        dice.shuffle(pairs)
        yield _depth_first(count, pairs, starts)
        backward = [(reader, maker) for maker, reader in pairs]
        yield tuple(reversed(_depth_first(count, backward, starts)))


def _depth_first(
    count: int, edges: Iterable[tuple[int, int]], starts: Iterable[int]
) -> tuple[int, ...]:
    """Take, again and again, the unit that became ready last; the last of `starts` begins."""
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


def rates(device: Device) -> tuple[object, ...]:
    """Return what a device does and holds: all but its name, its host and its overheads."""
    return (
        device.kind,
        device.memory_bytes,
        device.flops_per_s,
        device.memory_bytes_per_s,
        device.launch_s,
        device.threads,
    )


def distinct_orders(
    cluster: Cluster, trait: Callable[[Device], object]
) -> Iterator[tuple[str, ...]]:
    """Yield every order of every subset; devices that could change places are taken in order.

    Two could where their traits are equal, and their links to every other device.

    Args:
        cluster: the devices and their links.
        trait: what two devices must have in common.
    """
    kinds = _kinds(cluster, trait)
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


def _kinds(cluster: Cluster, trait: Callable[[Device], object]) -> list[int]:
    """Return, for each device, the first that it could change places with; itself, maybe."""
    devices = cluster.devices
    traits = [trait(device) for device in devices]
    links = [[cluster.link(device.name, other.name) for other in devices] for device in devices]

    def swappable(a: int, b: int) -> bool:
        others = (i for i in range(len(links)) if i not in (a, b))
        return traits[a] == traits[b] and all(links[a][i] == links[b][i] for i in others)

    found: list[int] = []
    for i in range(len(devices)):
        firsts = (j for j in range(i) if found[j] == j and swappable(j, i))
        found.append(next(firsts, i))
    return found


def sorted_orders(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the given order of the devices, and orders by speed, memory and host, each once."""
    given = cluster.devices
    orders: list[Sequence[Device]] = [
        given,
        sorted(given, key=lambda d: -d.flops_per_s),
        sorted(given, key=lambda d: d.flops_per_s),
        sorted(given, key=lambda d: -d.memory_bytes),
        sorted(given, key=lambda d: d.memory_bytes),
        sorted(given, key=lambda d: d.host),
    ]
    return tuple(dict.fromkeys(tuple(device.name for device in order) for order in orders))


def beginnings(orders: Sequence[tuple[str, ...]], step: int) -> tuple[tuple[str, ...], ...]:
    """Return whole orders and how they begin: all devices, then fewer by `step`, 1 always."""
    lengths = [*range(len(orders[0]), 1, -max(1, step)), 1]
    return tuple(dict.fromkeys(order[:length] for length in lengths for order in orders))
