"""Order of sums x micro-batches of a replica -> the parts that it sends of each bucket.

    replica   [0 1 2 3]        one part: all that it adds itself
    micro     [0] [1] [2] [3]  each micro-batch by itself, as soon as it is there
    tree      [0..3] [4 5]     nodes of the binary tree over the numbers of a step

With ZeRO 2, where no replica keeps all gradients, a tree's micro-batches are sent by themselves.

A part is known by the first micro-batch in it. This file knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Stages


def parts(stages: Stages, replica: int) -> tuple[int | None, ...]:
    """Return the messages of one bucket that a replica sends, in order.

    Each is the number of the first micro-batch in it; None stands for the only one.
    """
    micros = stages.micros[replica]
    if stages.sums_each:
        return micros
    if stages.sum_order in ("replica", "backend"):
        return (None,)
    return tuple(start for start, _ in nodes(micros))


def nodes(micros: Sequence[int]) -> list[tuple[int, int]]:
    """Return the largest nodes of the binary tree that these leaves fill: (first, how many)."""
    found: list[tuple[int, int]] = []
    for micro in micros:
        _add(found, micro)
    return found


def _add(found: list[tuple[int, int]], micro: int) -> None:
    found.append((micro, 1))
    while len(found) > 1 and _are_siblings(*found[-2:]):
        (start, size), _ = found[-2:]
        found[-2:] = [(start, 2 * size)]


def _are_siblings(left: tuple[int, int], right: tuple[int, int]) -> bool:
    (start, size), (after, same) = left, right
    return size == same and after == start + size and start % (2 * size) == 0
