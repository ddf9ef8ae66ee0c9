"""The ideals of a graph: the sets of nodes that contain all that their members depend on.

A contiguous split is a chain of ideals, from the empty one to the whole graph: what the first
stage has run, what the first two have, and so on. It knows edges; it knows no costs and no devices.

Source: Tarnawski et al., NeurIPS'20, section 4; here level by level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Sets = NDArray[np.bool_]  # [set, node]
Indices = NDArray[np.intp]


def ideals(count: int, edges: Iterable[tuple[int, int]], most: int) -> Sets | None:
    """Return every ideal, by size; None when there are more than `most`."""
    top = 8 * -(-count // 8)  # the first node is the first bit of the first byte
    bit = [1 << (top - 1 - node) for node in range(count)]
    before, readers = [0] * count, [list[int]() for _ in range(count)]
    for a, b in sorted(set(edges)):
        before[b] |= bit[a]
        readers[a].append(b)
    level = {0: tuple(node for node in range(count) if not before[node])}
    found = [0]
    for _ in range(count):
        level = _larger_by_one(level, bit, before, readers, most - len(found))
        if not level:
            return None
        found += sorted(level)
    return _unpacked(found, count, top // 8)


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


def _larger_by_one(
    level: Mapping[int, tuple[int, ...]],
    bit: Sequence[int],
    before: Sequence[int],
    readers: Sequence[Sequence[int]],
    most: int,
) -> dict[int, tuple[int, ...]]:
    """Return the ideals with one node more, each with the nodes that may join it next.

    Sets are whole numbers, a bit for each node. Empty when there are more than `most`.
    """
    found: dict[int, tuple[int, ...]] = {}
    for ideal, ready in level.items():
        for node in ready:
            larger = ideal | bit[node]
            if larger in found:
                continue
            if len(found) >= most:
                return {}
            missing = ~larger
            new = [reader for reader in readers[node] if not before[reader] & missing]
            found[larger] = (*(other for other in ready if other != node), *new)
    return found


def _unpacked(sets: Sequence[int], count: int, nbytes: int) -> Sets:
    text = b"".join(each.to_bytes(nbytes, "big") for each in sets)
    packed = np.frombuffer(text, dtype=np.uint8).reshape(len(sets), nbytes)
    return np.unpackbits(packed, axis=1, count=count).astype(bool)


def _distinct(sets: Sets) -> Sets:
    """Return each set once, in an order that depends on nothing but the sets."""
    _, first = np.unique(_packed(sets), return_index=True)
    return sets[first]


def _packed(sets: Sets) -> NDArray[np.void]:
    """Return one comparable key per set."""
    packed = np.ascontiguousarray(np.packbits(sets, axis=1))
    return packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1)
