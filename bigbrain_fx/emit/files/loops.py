"""Actions on micro-batches -> loops: what repeats while the micro-batch counts up is written once.

F0 F1 B0 F2 B1 F3 B2 B3     becomes     for m in 0, 1: F(m)     warm-up
                                        for m in 0, 1: B(m), F(m+2)
                                        for m in 2, 3: B(m)

Interleaved orders repeat every few micro-batches: `for m in range(0, 30, 2)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BODY = 64
MAX_STRIDE = 16
MAX_STATEMENTS = 28  # more than that is no loop a person would read: write a table


@dataclass(frozen=True)
class MicroAction:
    """One action on one micro-batch."""

    action: str
    micro: int


@dataclass(frozen=True)
class MicroLoop:
    """`body` repeated `count` times; in turn i every micro-batch number is higher by i strides."""

    body: tuple[MicroAction, ...]
    count: int
    stride: int = 1


def roll(steps: Sequence[MicroAction]) -> list[MicroLoop]:
    """Write steps as loops, from left to right, each time the loop that saves most.

    `unroll(roll(steps)) == steps` always; a loop of count 1 is a plain statement.
    """
    loops: list[MicroLoop] = []
    start = 0
    while start < len(steps):
        length, count, stride = _best(steps, start)
        loops.append(MicroLoop(tuple(steps[start : start + length]), count, stride))
        start += length * count
    return loops


def unroll(loops: Sequence[MicroLoop]) -> list[MicroAction]:
    """Return the steps that loops stand for."""
    return [
        MicroAction(step.action, step.micro + turn * loop.stride)
        for loop in loops
        for turn in range(loop.count)
        for step in loop.body
    ]


def is_readable(loops: Sequence[MicroLoop]) -> bool:
    """Whether the loops are short enough to be written as text."""
    return sum(len(loop.body) for loop in loops) <= MAX_STATEMENTS


def _best(steps: Sequence[MicroAction], start: int) -> tuple[int, int, int]:
    """Return length, count and stride of the loop from `start` that saves most, else (1, 1, 1)."""
    best = (1, 1, 1)
    for length in range(1, min(MAX_BODY, (len(steps) - start) // 2) + 1):
        stride = steps[start + length].micro - steps[start].micro
        if not 1 <= stride <= MAX_STRIDE:
            continue
        count = _turns(steps, start, length, stride)
        if count > 1 and length * (count - 1) > best[0] * (best[1] - 1):
            best = (length, count, stride)
    return best


def _turns(steps: Sequence[MicroAction], start: int, length: int, stride: int) -> int:
    """Return how often what begins at `start` comes, in whole turns."""
    end = start + length
    while end < len(steps) and _follows(steps[end - length], steps[end], stride):
        end += 1
    return (end - start) // length


def _follows(before: MicroAction, step: MicroAction, stride: int) -> bool:
    return step.action == before.action and step.micro == before.micro + stride
