"""Pieces of dimensions, and how two lists of them are made the same: a union-find that can divide.

A dimension is a list of factors, row-major: 384 rows of a fused qkv are 3 * 4 * 32. A factor may
also be pieces that stand one after another: 40 rows of queries, keys and values are 24 + 8 + 8.
What all pieces have can be divided in each of them. Rules see an op as a `ShardCall` of such lists.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from bigbrain_fx.core import Arg, Op, ParamRef, Ref, leaves as leaves_of_args


class Factor:
    """A piece of a dimension; `up` leads to the piece that it was unified with.

    A factor may be a product, `parts`, or a sum, `pieces`. A sum may be given up: its pieces are
    forgotten where the factor has to be divided otherwise.
    """

    __slots__ = ("parts", "pieces", "size", "tags", "up")

    def __init__(self, size: int) -> None:
        self.size = size
        self.up: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None
        self.pieces: tuple[Dimension, ...] = ()
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
        """Divide into (first, rest); both are what it was. Pieces that it had are forgotten."""
        self.pieces = ()
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
    """Yield the factors that are not divided further, by their roots; ones are left out.

    Pieces that stand one after another are one factor; see `everything`.
    """
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


def everything(factors: Iterable[Factor]) -> Iterator[Factor]:
    """Yield leaves, and after those that are pieces what all of their pieces have."""
    for leaf in leaves(factors):
        yield leaf
        if leaf.pieces:
            first, *others = (list(everything(piece)) for piece in leaf.pieces)
            yield from (own for own in dict.fromkeys(first) if all(own in o for o in others))


def strides(factors: Iterable[Factor]) -> Iterator[tuple[Factor, tuple[int, ...]]]:
    """Yield everything in a dimension, with how many numbers each index has side by side.

    Where pieces follow one another there is one such number for each of them. A factor that a piece
    has twice is yielded twice.
    """
    inner = 1
    for leaf in reversed(list(leaves(factors))):
        yield leaf, (inner,)
        for own, steps in _strides_in_pieces(leaf):
            yield own, tuple(step * inner for step in steps)
        inner *= leaf.size


def _strides_in_pieces(leaf: Factor) -> Iterator[tuple[Factor, tuple[int, ...]]]:
    for own in [*everything([leaf])][1:]:
        found: list[int] = []
        twice = False
        for piece in leaf.pieces:
            (steps, *more) = (steps for factor, steps in strides(piece) if factor is own)
            found += steps * (size(piece) // (own.size * sum(steps)))
            twice = twice or bool(more)
        alike = len(set(found)) == 1
        for _ in range(2 if twice else 1):
            yield own, tuple(found[:1] if alike else found)


def size(factors: Iterable[Factor]) -> int:
    """Return how many indices factors have together."""
    return math.prod(factor.size for factor in factors)


def unify(one: Iterable[Factor], other: Iterable[Factor]) -> None:
    """Make two dimensions the same, dividing factors where one is finer than the other.

    Raises:
        UnlikeError: their sizes cannot be divided in the same way.
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


def joined(pieces: Iterable[Dimension]) -> Factor:
    """Return pieces that stand one after another."""
    found = Factor(0)
    found.pieces = tuple(pieces)
    found.size = sum(map(size, found.pieces))
    return found


def cut(own: Dimension, sizes: Sequence[int]) -> tuple[Dimension, ...]:
    """Cut a dimension into pieces: equal ones are (which, index), others stand one after another.

    Nothing is returned where it has been divided otherwise.
    """
    if len(set(sizes)) == 1:
        return (reshaped((own,), (len(sizes), sizes[0]))[1],) * len(sizes)
    known = [*leaves(own)]
    leaf = known[0] if len(known) == 1 else None
    if leaf is None or (leaf.pieces and [*map(size, leaf.pieces)] != [*sizes]):
        return ()
    if not leaf.pieces:
        leaf.pieces = fresh(sizes)
        for piece in flat(leaf.pieces):
            piece.tags |= leaf.tags
    return leaf.pieces


def join_alone(leaf: Factor, name: str) -> None:
    """Divide pieces that nothing divides as those beside them, by what is tagged so.

    An MLP's hidden units, say, that stand beside heads in one matrix.
    """
    of = [list(everything(piece)) for piece in leaf.pieces]
    alone = [own[0] for own in of if len(own) == 1 and name not in own[0].tags]
    beside = [own for own in of if len(own) != 1 or name in own[0].tags]
    for shared in beside[0] if beside else ():
        fits = all(shared in own for own in beside) and name in shared.tags
        if fits and all(each.size % shared.size == 0 for each in alone):
            for each in alone:
                unify((each,), (shared, Factor(each.size // shared.size)))
            return


def _join(a: Factor, b: Factor, left: deque[Factor], right: deque[Factor]) -> None:
    if a.size == b.size:
        if a.pieces and b.pieces:
            _join_pieces(a, b)
        a, b = (b, a) if b.pieces and not a.pieces else (a, b)
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


def _join_pieces(a: Factor, b: Factor) -> None:
    """Make like pieces the same; of others, those of the first are kept."""
    if [*map(size, a.pieces)] == [*map(size, b.pieces)]:
        with suppress(UnlikeError):
            for one, other in zip(a.pieces, b.pieces, strict=True):
                unify(one, other)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """Deal factors out to new sizes; where sizes do not divide, new factors come out."""
    found: list[Dimension] = []
    for before, after in _blocks(dims, shape):
        found += _dealt(before, after) or fresh(after)
    return tuple(found)


def divided_otherwise(dims: Iterable[Dimension], before: Dimension) -> tuple[Factor, ...]:
    """Return what was dealt out of a dimension in vain: new factors, of which it has no parts."""
    known = {*leaves(before)}
    return tuple(factor for factor in flat(dims) if factor not in known)


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


# ------------------------------------------------------------------------------------------------
# An op as a rule sees it: its arguments, the dimensions of what it reads, and what a rule says.


@dataclass(frozen=True, slots=True)
class Ruled:
    """One op's effect on dimensions.

    Attributes:
        outs: dimensions of its tensors, in order; new factors where it needs old ones whole.
        along: factors of which it computes each part from the same part.
        summed: factors over which it adds: the results of the parts are added.
        whole: factors that it needs whole, though they may be one of the others elsewhere.
    """

    outs: tuple[Dims, ...]
    along: tuple[Factor, ...] = ()
    summed: tuple[Factor, ...] = ()
    whole: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class ShardCall:
    """One op in numbers.

    Attributes:
        known: the dimensions of every parameter and value so far.
        cuts: of a slice that is one of several which stand end to end: the sizes of them all.
    """

    op: Op
    known: Mapping[Ref | ParamRef, Dims]
    cuts: tuple[int, ...] = ()
    keywords: Mapping[str, Arg] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keywords", dict(self.op.kwargs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the first result."""
        return cast("tuple[int, ...]", self.op.outputs[0].shape)

    def arg(self, place: int, name: str, default: Arg = None) -> Arg:
        """Return an argument by its place or name."""
        return (
            self.op.args[place] if place < len(self.op.args) else (self.keywords.get(name, default))
        )

    def number(self, place: int, name: str, default: int) -> int:
        """Return an argument that is a number.

        Raises:
            TypeError: it is known at run time only.
        """
        found = self.arg(place, name, default)
        if not isinstance(found, int):
            raise TypeError(f"{name} is no number")
        return found

    def numbers(self, place: int, name: str) -> tuple[int, ...]:
        """Return an argument that is a list of numbers, or one."""
        found = self.arg(place, name)
        items = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(item, int) for item in items):
            raise TypeError(f"{name} is no list of numbers")
        return cast("tuple[int, ...]", items)

    def is_tensor(self, arg: Arg) -> bool:
        """Whether an argument is a tensor."""
        return isinstance(arg, Ref | ParamRef) and arg in self.known

    def dims(self, arg: Arg) -> Dims:
        """Return the dimensions of an argument.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(arg, Ref | ParamRef) or arg not in self.known:
            raise TypeError("expected a tensor")
        return self.known[arg]

    def tensors(self) -> Iterator[Dims]:
        """Yield the dimensions of each tensor that it reads."""
        for arg in leaves_of_args((*self.op.args, *self.keywords.values())):
            if isinstance(arg, Ref | ParamRef) and arg in self.known:
                yield self.known[arg]


Rule: TypeAlias = Callable[[ShardCall], Ruled]


def tag(factors: Iterable[Factor], name: str) -> None:
    """Note what factors are: heads, hidden units, ..."""
    for factor in factors:
        factor.root.tags.add(name)
        tag(flat(factor.root.pieces), name)
