"""Every way to run a line of ops on a few devices, told in full; and what none can go below.

    replicas   disjoint sets of devices, others left idle; micro-batches dealt in every number
    stages     the devices of a replica in every order, cut at every place of the line of ops

It knows seconds of ops and links; nothing of the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise, permutations, product
from typing import TypeAlias

Stage: TypeAlias = tuple[str, int]
"""Its device, and the number of the op before which it ends."""
Line: TypeAlias = tuple[Stage, ...]


@dataclass(frozen=True)
class Way:
    """One way: a line for each replica, and how many micro-batches each has."""

    lines: tuple[Line, ...]
    micros: tuple[int, ...]

    def __str__(self) -> str:
        """Say it in short."""
        lines = " | ".join(
            " -> ".join(f"{name} to {end}" for name, end in line) for line in self.lines
        )
        return f"{lines}, micro-batches {self.micros}"


def ways(names: Sequence[str], ops: int, micro_batches: int) -> Iterator[Way]:
    """Yield every way to run so many ops and micro-batches on devices of these names."""
    for sets in filter(None, disjoint(tuple(names))):
        each = [tuple(lines(own, ops)) for own in sets]
        for some in product(*each):
            yield from (Way(some, micros) for micros in compositions(micro_batches, len(sets)))


@cache
def disjoint(names: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return every choice of disjoint sets of devices; none, too."""
    if not names:
        return ((),)
    first, rest = names[0], names[1:]
    found = list(disjoint(rest))  # without the first
    for size in range(1, len(names) + 1):
        for others in combinations(rest, size - 1):
            left = tuple(name for name in rest if name not in others)
            found += [((first, *others), *more) for more in disjoint(left)]
    return tuple(found)


def lines(names: Sequence[str], ops: int) -> Iterator[Line]:
    """Yield every line of stages on all of these devices."""
    for order in permutations(names):
        for lengths in compositions(ops, len(names)):
            yield tuple(zip(order, accumulate(lengths), strict=True))


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
    """

    op_s: Mapping[str, Sequence[float]]
    op_bytes: Sequence[int]
    room: Mapping[str, float]

    def fits(self, way: Way) -> bool:
        """Whether what is held all the time might."""
        return all(
            sum(self.op_bytes[first:end]) <= self.room[name]
            for line in way.lines
            for name, first, end in spans(line)
        )

    def of(self, way: Way) -> float:
        """Return them: a stage waits for the first micro-batch, and the last one's way back."""
        return max(
            below([sum(self.op_s[name][a:b]) for name, a, b in spans(line)], micros)
            for line, micros in zip(way.lines, way.micros, strict=True)
        )


def spans(line: Line) -> Iterator[tuple[str, int, int]]:
    """Yield the device, the first op and the one after the last of each stage."""
    first = 0
    for name, end in line:
        yield name, first, end
        first = end


def below(stages_s: Sequence[float], micro_batches: int) -> float:
    """Return what no order of a line's forwards and backwards takes less than."""
    heads = accumulate(stages_s, initial=0.0)
    return max(head + micro_batches * own for head, own in zip(heads, stages_s, strict=False))
