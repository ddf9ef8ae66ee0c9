"""Units on devices -> stages: each is what one device runs without waiting in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def stage_lists(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], homes: Sequence[int]
) -> list[list[int]]:
    """Return the units of each stage: the greedy from either end, whichever makes fewer.

    Neither direction always wins; the minimum is hard, so take the better of the two.

    Args:
        before: for each unit, those that it waits for, each once.
        after: for each unit, those that wait for it.
        homes: the device of each unit, as a number.
    """
    early = _greedy(before, after, homes)
    late = [sorted(stage) for stage in reversed(_greedy(after, before, homes))]
    return early if len(early) <= len(late) else late


def _greedy(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], homes: Sequence[int]
) -> list[list[int]]:
    """Emit, again and again, all that one device can run now: one that it finishes, or the most."""
    devices = list(dict.fromkeys(homes))
    place = {device: -i for i, device in enumerate(devices)}
    left = {device: 0 for device in devices}
    waiting = [len(each) for each in before]
    ready: dict[int, set[int]] = {device: set() for device in devices}
    for unit, home in enumerate(homes):
        left[home] += 1
        if not waiting[unit]:
            ready[home].add(unit)
    closures = {d: _closure(after, homes, waiting, ready[d]) for d in devices}
    stages: list[list[int]] = []
    while left:
        best = max(left, key=lambda d: (len(closures[d]) == left[d], len(closures[d]), place[d]))
        units = sorted(closures[best])
        stages.append(units)
        ready[best].clear()
        stale = {best}
        for unit in units:
            for later in after[unit]:
                waiting[later] -= 1
                stale.add(homes[later])
                if not waiting[later] and later not in closures[best]:
                    ready[homes[later]].add(later)
        left[best] -= len(units)
        if not left[best]:
            del left[best]
        for device in stale & left.keys():
            closures[device] = _closure(after, homes, waiting, ready[device])
    return stages


def _closure(
    after: Sequence[Sequence[int]],
    homes: Sequence[int],
    waiting: Sequence[int],
    ready: Iterable[int],
) -> set[int]:
    """Return what a device can run with nothing more from the others."""
    met: dict[int, int] = {}
    pending = list(ready)
    closure = set(pending)
    while pending:
        unit = pending.pop()
        for later in after[unit]:
            met[later] = met.get(later, 0) + 1
            if homes[later] == homes[unit] and met[later] == waiting[later]:
                closure.add(later)
                pending.append(later)
    return closure


def neighbours(count: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return, for each of so many, the second ends of the edges that begin there."""
    found: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        found[a].append(b)
    return found
