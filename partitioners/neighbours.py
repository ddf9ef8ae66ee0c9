"""What hangs together in a graph: who is whose neighbour, and pieces grown from one node.

Walks over placements move pieces as a whole, because single nodes that are dear to cut off never
leave. It knows no cost and no method.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence


def neighbours(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return, for each of `count` nodes, those that it is in a pair with, sorted."""
    near: list[set[int]] = [set() for _ in range(count)]
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    return [sorted(each) for each in near]


def grown(
    near: Sequence[Sequence[int]], homes: Sequence[int], first: int, most: int, dice: random.Random
) -> list[int]:
    """Return up to `most` nodes on one device, grown from the first in any direction."""
    at, piece, seen = homes[first], [first], {first}
    edge = list(near[first])
    while edge and len(piece) < most:
        node = edge.pop(dice.randrange(len(edge)))
        if node not in seen and homes[node] == at:
            seen.add(node)
            piece.append(node)
            edge += near[node]
    return piece
