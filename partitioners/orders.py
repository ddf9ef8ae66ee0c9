"""The orders a pipeline may be tried in: topological orders of units, and sequences of devices.

It knows edges and devices; it knows no times and no method.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from bigbrain_fx.core import Cluster, Device

MOST_SEQUENCES = 2000  # six unlike devices have 1956
_LENGTHS_TRIED = 16


def unit_orders(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return different topological orders of units 0 .. count-1; the given order is the first.

    Depth first finishes a branch before it begins the next, so that fewer values cross a cut;
    "late" runs every unit as shortly before its readers as it can (depth first from the end).

    Args:
        count: how many units, numbered in a topological order.
        edges: pairs (maker, reader).
    """
    pairs = sorted(set(edges))
    given = tuple(range(count))
    backward = [(reader, maker) for maker, reader in pairs]
    late = tuple(reversed(_depth_first(count, backward, range(count))))
    return tuple(dict.fromkeys((given, _depth_first(count, pairs, range(count)[::-1]), late)))


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


def device_sequences(cluster: Cluster, use_all: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the orders of devices along the pipeline that are worth trying, longest first.

    Every order of every subset, where devices that could be swapped without a difference (same
    rates, memory and links) are taken in the given order; when that makes more than
    `MOST_SEQUENCES`: the given order, and orders sorted by speed, memory and host, and the
    beginnings of each.

    Args:
        cluster: the devices and their links.
        use_all: leave out sequences that do not use every device.
    """
    every = list(islice(_distinct(cluster), MOST_SEQUENCES + 1))
    if len(every) > MOST_SEQUENCES:
        every = list(_sorted_orders(cluster))
    whole = len(cluster.devices)
    kept = [sequence for sequence in every if not use_all or len(sequence) == whole]
    return tuple(sorted(kept, key=len, reverse=True))  # stable: the given order stays in front


def _distinct(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    kinds = [_alike(cluster, device) for device in cluster.devices]
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


def _alike(cluster: Cluster, device: Device) -> int:
    """Return the index of the first device that could change places with this one."""
    return next(i for i, other in enumerate(cluster.devices) if _swappable(cluster, device, other))


def _swappable(cluster: Cluster, a: Device, b: Device) -> bool:
    others = [d.name for d in cluster.devices if d.name not in (a.name, b.name)]
    return _rates(a) == _rates(b) and all(
        cluster.link(a.name, other) == cluster.link(b.name, other) for other in others
    )


def _rates(device: Device) -> tuple[object, ...]:
    return (
        device.kind,
        device.memory_bytes,
        device.flops_per_s,
        device.memory_bytes_per_s,
        device.launch_s,
        device.threads,
    )


def _sorted_orders(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    given = cluster.devices
    orders: list[Sequence[Device]] = [
        given,
        sorted(given, key=lambda d: -d.flops_per_s),
        sorted(given, key=lambda d: d.flops_per_s),
        sorted(given, key=lambda d: -d.memory_bytes),
        sorted(given, key=lambda d: d.memory_bytes),
        sorted(given, key=lambda d: d.host),
    ]
    lengths = _lengths(len(given))
    names = dict.fromkeys(tuple(d.name for d in order) for order in orders)
    yield from dict.fromkeys(order[:length] for length in lengths for order in names)


def _lengths(count: int) -> list[int]:
    """Return how many devices to try: all, then fewer in some 16 steps, 1 always."""
    step = max(1, count // _LENGTHS_TRIED)
    return [*range(count, 1, -step), 1]
