"""Pieces of dimensions, and how two lists of them are made the same: a union-find that can divide.

A dimension is a list of factors, row-major: 384 rows of a fused qkv are 3 * 4 * 32. It knows
numbers only; ops are `rules`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias


class Factor:
    """A piece of a dimension; `up` leads to the one that it was made the same as."""

    __slots__ = ("parts", "size", "tags", "up")

    def __init__(self, size: int) -> None:
        self.size = size
        self.up: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None
        self.tags: set[str] = set()

    @property
    def root(self) -> Factor:
        """The factor that stands for all that are the same."""
        found = self
        while found.up is not None:
            found = found.up
        if found is not self:
            self.up = found  # the next walk is short
        return found

    def divide(self, first: int) -> tuple[Factor, Factor]:
        """Divide into (first, rest); both are what it was."""
        self.parts = Factor(first), Factor(self.size // first)
        for part in self.parts:
            part.tags |= self.tags
        return self.parts


Dimension: TypeAlias = tuple[Factor, ...]
Dims: TypeAlias = tuple[Dimension, ...]


class UnlikeError(ValueError):
    """Report two dimensions that have no factors in common: 6 and 4."""


def fresh(shape: Iterable[int]) -> Dims:
    """Return dimensions that are nobody's yet."""
    return tuple((Factor(size),) for size in shape)


def leaves(factors: Iterable[Factor]) -> Iterator[Factor]:
    """Yield the factors that are not divided further, by their roots; ones are left out."""
    for factor in factors:
        root = factor.root
        if root.parts:
            yield from leaves(root.parts)
        elif root.size != 1:
            yield root


def flat(dims: Iterable[Dimension]) -> Iterator[Factor]:
    """Yield the leaves of several dimensions."""
    for dimension in dims:
        yield from leaves(dimension)


def size(factors: Iterable[Factor]) -> int:
    """Return how many indices factors have together."""
    return math.prod(factor.size for factor in factors)


def unify(one: Iterable[Factor], other: Iterable[Factor]) -> None:
    """Make two dimensions the same, dividing factors where one is finer than the other.

    Raises:
        UnlikeError: their sizes cannot be divided alike.
    """
    left, right = deque(leaves(one)), deque(leaves(other))
    while left and right:
        a, b = left.popleft().root, right.popleft().root
        if a.parts or b.parts:  # divided since it was put there: the same factor stood twice
            left.extendleft(reversed(list(leaves([a]))))
            right.extendleft(reversed(list(leaves([b]))))
        elif a is not b:
            _join(a, b, left, right)
    if left or right:
        raise UnlikeError("dimensions of other sizes")


def _join(a: Factor, b: Factor, left: deque[Factor], right: deque[Factor]) -> None:
    if a.size == b.size:
        b.up = a
        a.tags |= b.tags
    elif a.size % b.size == 0:
        left.extendleft(reversed(a.divide(b.size)))
        right.appendleft(b)
    elif b.size % a.size == 0:
        right.extendleft(reversed(b.divide(a.size)))
        left.appendleft(a)
    else:
        raise UnlikeError(f"{a.size} and {b.size} have no common parts")


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """Deal factors out to new sizes; where sizes do not divide, new factors come out."""
    found: list[Dimension] = []
    for before, after in _blocks(dims, shape):
        found += _dealt(before, after) or fresh(after)
    return tuple(found)


def _blocks(dims: Dims, shape: Sequence[int]) -> Iterator[tuple[list[Dimension], list[int]]]:
    """Pair runs of old dimensions with runs of new sizes that have as many indices."""
    old, new = deque(dims), deque(shape)
    while old or new:
        before, after = [], []
        have = want = 1
        if old:
            before.append(old.popleft())
            have = size(before[0])
        while have != want or (not before and new):
            if want < have or not old:
                if not new:
                    raise UnlikeError("a reshape to another number of elements")
                after.append(new.popleft())
                want *= after[-1]
            else:
                before.append(old.popleft())
                have *= size(before[-1])
        yield before, after


def _dealt(dims: Iterable[Dimension], shape: Sequence[int]) -> list[Dimension] | None:
    have, found = deque(flat(dims)), []
    for want in shape:
        own: list[Factor] = []
        while (got := size(own)) < want:
            factor = have.popleft()
            need = want // got
            if factor.size > need and factor.size % need == 0:
                factor, rest = factor.divide(need)
                have.appendleft(rest)
            if want % (got * factor.size):
                return None
            own.append(factor)
        found.append(tuple(own))
    return found
