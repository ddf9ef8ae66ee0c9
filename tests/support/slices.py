"""Slices of the nightly tests: parts of about equal time, the same parts on every machine.

A file stays together, because its tests share fixtures. A file that takes longer than `LONGEST_S`
is divided into blocks of consecutive tests. Seconds are those of `tests/durations.json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
LONGEST_S = 240.0
UNKNOWN_S = 2.0  # per test of a file that was never timed
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, spread evenly


class SliceError(ValueError):
    """A slice that does not exist."""


@dataclass(frozen=True)
class Slice:
    """Part `number` of `count`, counted from 1; `turn` rotates the order of its files."""

    number: int
    count: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parsed(text: str) -> Slice:
    """Read `3/8`.

    Raises:
        SliceError: The text is no such pair, or the number is not within 1 and the count.
    """
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if found is None:
        raise SliceError(f"a slice is written NUMBER/COUNT, for example 3/8, not {text!r}")
    number, count = int(found[1]), int(found[2])
    if not 1 <= number <= count:
        raise SliceError(f"slice {text} does not exist: the number must be 1 to {count}")
    return Slice(number, count)


def of_day(day: int, count: int) -> Slice:
    """Return the slice of a day: each in its turn, in another order each time round."""
    return Slice(day % count + 1, count, day // count)


def selected(tests: Sequence[str], part: Slice, seconds: Mapping[str, float]) -> list[str]:
    """Return the tests (node ids, in order of collection) of one slice, in the order to run them.

    Args:
        tests: All tests; each is in exactly one of the `part.count` slices.
        part: The slice.
        seconds: How long the tests of a file take together, by file.
    """
    blocks = list(_blocks(tests, seconds))
    mine = [blocks[place] for place in _assigned([b.seconds for b in blocks], part)]
    return [test for block in rotated(mine, part.turn) for test in block.tests]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Begin elsewhere on each turn, so that a run that is cut short leaves out other items."""
    start = int(len(items) * (turn * GOLDEN % 1))
    return [*items[start:], *items[:start]]


@dataclass(frozen=True)
class _Block:
    tests: tuple[str, ...]
    seconds: float


def _blocks(tests: Sequence[str], seconds: Mapping[str, float]) -> Iterator[_Block]:
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    for file in sorted(files):
        own = files[file]
        whole = seconds.get(file, UNKNOWN_S * len(own))
        count = min(max(1, math.ceil(whole / LONGEST_S)), len(own))
        for place in range(count):
            block = own[len(own) * place // count : len(own) * (place + 1) // count]
            yield _Block(tuple(block), whole * len(block) / len(own))


def _assigned(seconds: Sequence[float], part: Slice) -> list[int]:
    """Give the longest block to the slice with the least so far; return the places of one slice."""
    loads, mine = [0.0] * part.count, []
    for place in sorted(range(len(seconds)), key=lambda place: (-seconds[place], place)):
        least = min(range(part.count), key=lambda number: (loads[number], number))
        loads[least] += seconds[place]
        if least == part.number - 1:
            mine.append(place)
    return sorted(mine)
