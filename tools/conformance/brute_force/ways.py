"""Every way to run a line of ops on a few devices, told in full; and what none can go below.

    replicas   disjoint sets of devices, others left idle; micro-batches dealt in every number
    stages     the devices of a replica in every order, cut at every place of the line of ops
    members    groups of as many devices in every order, in shares of small numbers, of every axes

It knows seconds of ops and links; nothing of the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise, permutations, product
from math import gcd
from typing import TypeAlias

Group: TypeAlias = tuple[str, ...]
Stage: TypeAlias = tuple[Group, int]
"""Who computes it, and the number of the op before which it ends."""
Line: TypeAlias = tuple[Stage, ...]
MOST_SHARE = 4


@dataclass(frozen=True)
class Way:
    """One way: a line for each replica, and how many micro-batches each has.

    Attributes:
        shares: of the members of a group.
        axes: what they divide, by number.
    """

    lines: tuple[Line, ...]
    micros: tuple[int, ...]
    shares: tuple[int, ...] = (1,)
    axes: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Say it in short."""
        lines = " | ".join(
            " -> ".join(f"{'+'.join(group)} to {end}" for group, end in line) for line in self.lines
        )
        divided = f", shares {self.shares} of axes {self.axes}" if len(self.shares) > 1 else ""
        return f"{lines}, micro-batches {self.micros}{divided}"


def ways(
    names: Sequence[str], ops: int, micro_batches: int, axes: Sequence[int], most: int
) -> Iterator[Way]:
    """Yield every way.

    Args:
        names: of the devices.
        ops: of the line.
        micro_batches: of a step.
        axes: the sizes of what may be divided.
        most: members of a group.
    """
    for members in range(1, min(most, len(names)) + 1):
        divided = list(_divided(members, axes)) if members > 1 else [((1,), ())]
        for sets in filter(None, disjoint(tuple(names), members)):
            each = [tuple(lines(own, ops, members)) for own in sets]
            for some in product(*each):
                for micros in compositions(micro_batches, len(sets)):
                    yield from (Way(some, micros, *how) for how in divided)


def _divided(
    members: int, axes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield shares and axes that have a part for each member."""
    usable = [number for number, size in enumerate(axes) if size >= members]
    for shares in product(range(1, MOST_SHARE + 1), repeat=members):
        if gcd(*shares) == 1:
            for size in range(1, len(usable) + 1):
                yield from ((shares, some) for some in combinations(usable, size))


@cache
def disjoint(names: tuple[str, ...], members: int) -> tuple[tuple[Group, ...], ...]:
    """Return every choice of disjoint sets of devices, each of a multiple of so many; none, too."""
    if not names:
        return ((),)
    first, rest = names[0], names[1:]
    found = list(disjoint(rest, members))  # without the first
    for size in range(members, len(names) + 1, members):
        for others in combinations(rest, size - 1):
            left = tuple(name for name in rest if name not in others)
            found += [((first, *others), *more) for more in disjoint(left, members)]
    return tuple(found)


def lines(names: Group, ops: int, members: int) -> Iterator[Line]:
    """Yield every line of stages on all of these devices, which compute in groups."""
    count = len(names) // members
    for order in permutations(names):
        groups = [order[i * members : (i + 1) * members] for i in range(count)]
        for lengths in compositions(ops, count):
            yield tuple(zip(groups, accumulate(lengths), strict=True))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a sum of so many, none of them 0, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


# --------------------------------------------------------------------------- what none goes below


@dataclass(frozen=True)
class Floor:
    """Seconds that a way surely takes.

    Attributes:
        op_s: device -> seconds of each op of a micro-batch, forward and backward.
        op_bytes: what is held for each op's weights, gradients and optimizer.
        room: device -> bytes for that.
        divided: of each axis, the ops whose work it divides.
        sizes: of each axis.
    """

    op_s: Mapping[str, Sequence[float]]
    op_bytes: Sequence[int]
    room: Mapping[str, float]
    divided: Sequence[frozenset[int]]
    sizes: Sequence[int]

    def fits(self, way: Way) -> bool:
        """Whether what is held all the time might, as if all of an op's weights were divided."""
        return all(
            self._part(self.op_bytes, share, first, end, way) <= self.room[name]
            for line in way.lines
            for group, first, end in spans(line)
            for name, share in zip(group, way.shares, strict=True)
        )

    def of(self, way: Way) -> float:
        """Return them: a stage waits for the first micro-batch, and the last one's way back."""
        return max(
            below([self._stage_s(group, a, b, way) for group, a, b in spans(line)], micros)
            for line, micros in zip(way.lines, way.micros, strict=True)
        )

    def _stage_s(self, group: Group, first: int, end: int, way: Way) -> float:
        """Return the seconds of a micro-batch on the member that takes longest."""
        return max(
            self._part(self.op_s[name], share, first, end, way)
            for name, share in zip(group, way.shares, strict=True)
        )

    def _part(self, each: Sequence[float], share: int, first: int, end: int, way: Way) -> float:
        """Return a member's part of what a stage's ops have: its share of those divided.

        An axis is dealt out whole, so a part may be one smaller than its share.
        """
        whole = sum(each[first:end])
        if len(way.shares) == 1:
            return whole
        ops = {op for axis in way.axes for op in self.divided[axis] if first <= op < end}
        least = share / sum(way.shares) - 1 / min(self.sizes[axis] for axis in way.axes)
        return whole - (1 - max(0.0, least)) * sum(each[op] for op in ops)


def spans(line: Line) -> Iterator[tuple[Group, int, int]]:
    """Yield the group, the first op and the one after the last of each stage."""
    first = 0
    for group, end in line:
        yield group, first, end
        first = end


def below(stages_s: Sequence[float], micro_batches: int) -> float:
    """Return what no order of a line's forwards and backwards takes less than."""
    heads = accumulate(stages_s, initial=0.0)
    return max(head + micro_batches * own for head, own in zip(heads, stages_s, strict=False))
