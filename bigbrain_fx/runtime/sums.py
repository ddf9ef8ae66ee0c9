"""Flat sums of gradients, added up over micro-batches and replicas in the order of the plan.

    replica   each replica's own, ascending; then the replicas', ascending
    micro     all micro-batches, ascending by number
    tree      nodes of the binary tree over their numbers: what two siblings give is their parent

A part is a sum of neighbours: (first micro-batch, how many, numbers). This file knows numbers of
micro-batches; it knows no device, no channel and no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Sum:
    """A running sum: parts come ascending. The first of two that are added takes up the other."""

    is_tree: bool
    parts: list[tuple[int, int, Tensor]] = field(default_factory=list)

    def add(self, first: int, size: int, part: Tensor) -> None:
        """Add a part; it may be written into from now on."""
        self.parts.append((first, size, part))
        while len(self.parts) > 1 and self._joins():
            _, (_, more, right) = self.parts[-2:]
            first, size, left = self.parts[-2]
            self.parts[-2:] = [(first, size + more, left.add_(right))]

    def _joins(self) -> bool:
        if not self.is_tree:
            return True
        (first, size, _), (after, same, _) = self.parts[-2:]
        return _are_siblings(first, size, after, same)

    def total(self) -> Tensor:
        """Return the sum of all parts; what is left of a tree is added from the left."""
        _, _, total = self.parts[0]
        for _, _, right in self.parts[1:]:
            total = total.add_(right)
        self.parts = []
        return total


def sizes(order: str, micros: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts that a replica with these micro-batches sends: (first, how many)."""
    if order == "replica":
        return [(micros[0], len(micros))]
    if order == "micro":
        return [(micro, 1) for micro in micros]
    return _nodes(micros)


def _nodes(micros: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for micro in micros:
        found.append((micro, 1))
        while len(found) > 1 and _are_siblings(*found[-2], *found[-1]):
            first, size = found[-2]
            found[-2:] = [(first, 2 * size)]
    return found


def _are_siblings(first: int, size: int, after: int, same: int) -> bool:
    """Whether two nodes, (first, size) and (after, same), are halves of one."""
    return size == same and after == first + size and first % (2 * size) == 0
