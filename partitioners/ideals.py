"""The ideals of a graph: the sets of nodes that contain all that their members depend on.

A contiguous split is a chain of ideals, from the empty one to the whole graph: what the first
stage has run, what the first two have, and so on. It knows edges; it knows no costs and no devices.

Source: Tarnawski et al., NeurIPS'20, section 4; here level by level, with numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Sets = NDArray[np.bool_]  # [set, node]
Indices = NDArray[np.intp]


def ideals(count: int, edges: Iterable[tuple[int, int]], most: int) -> Sets | None:
    """Return every ideal, by size; None when there are more than `most`.

    Args:
        count: how many nodes; numbered 0 .. count-1.
        edges: pairs (earlier, later).
        most: where to give up.
    """
    before = np.zeros((count, count), dtype=bool)  # [node, what it waits for]
    for a, b in edges:
        before[b, a] = True
    level = np.zeros((1, count), dtype=bool)
    levels, total = [level], 1
    for _ in range(count):
        level = _larger_by_one(level, before)
        total += len(level)
        if total > most:
            return None
        levels.append(level)
    return np.concatenate(levels)


def prefixes(orders: Iterable[Sequence[int]]) -> Sets:
    """Return the ideals that are beginnings of these topological orders, by size, each once."""
    found: list[Sets] = []
    for order in orders:
        reached = np.zeros((len(order) + 1, len(order)), dtype=bool)
        for i, node in enumerate(order):
            reached[i + 1 :, node] = True
        found.append(reached)
    together = _distinct(np.concatenate(found))
    return together[np.argsort(together.sum(axis=1), kind="stable")]


def states(sets: Sets, members: Sequence[int]) -> Indices:
    """Number, for every set, which of `members` it has: 0 for none, then as they come."""
    keys = _packed(sets[:, list(members)])
    _, found = np.unique(keys, return_inverse=True)  # the empty set has the least key, so 0
    return found.reshape(-1).astype(np.intp)


def within(small: Sets, large: Sets) -> Sets:
    """Return [i, j]: whether small[i] is contained in large[j] (equal sets are)."""
    size = small.sum(axis=1, dtype=np.float32)
    shared = small.astype(np.float32) @ large.astype(np.float32).T  # exact: below 2**24
    found: Sets = shared == size[:, None]
    return found


def _larger_by_one(level: Sets, before: Sets) -> Sets:
    """Return the ideals with one node more; a node may join when all it waits for is there."""
    missing = ~level
    waits = missing.astype(np.float32) @ before.T.astype(np.float32) > 0
    rows, nodes = np.nonzero(missing & ~waits)
    larger = level[rows]
    larger[np.arange(len(rows)), nodes] = True
    return _distinct(larger)


def _distinct(sets: Sets) -> Sets:
    """Return each set once, in an order that depends on nothing but the sets."""
    _, first = np.unique(_packed(sets), return_index=True)
    return sets[first]


def _packed(sets: Sets) -> NDArray[np.void]:
    """Return one comparable key per set."""
    packed = np.ascontiguousarray(np.packbits(sets, axis=1))
    return packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1)
