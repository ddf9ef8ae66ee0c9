"""The topological orders of units that a pipeline may be tried in. It knows edges only."""

from __future__ import annotations

from collections.abc import Iterable


def unit_orders(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return different topological orders of units 0 .. count-1; the given order is the first.

    Depth first finishes a branch before it begins the next, so that fewer values cross a cut;
    "late" runs every unit as shortly before its readers as it can (depth first from the end).
    """
    pairs = sorted(set(edges))
    backward = [(reader, maker) for maker, reader in pairs]
    late = tuple(reversed(depth_first(count, backward, range(count))))
    early = depth_first(count, pairs, range(count)[::-1])
    return tuple(dict.fromkeys((tuple(range(count)), early, late)))


def depth_first(
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
