"""Runs of items that repeat -> loops: twelve layers, or pairs of layers in turn, are one statement.

    x = layers[0](x, mask)                      for layer in self.layers:
    x = layers[1](x, mask)      becomes             x = layer(x, mask)

A turn may be several items. A value that a turn reads is the same for all turns, made in the turn,
or made by the turn before (carried). The module finds items that repeat; it does not write text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Arg, Op, ParamRef, Ref, leaves
from bigbrain_fx.emit.ops.items import Item, LayerCall, gives_of, params_of, takes_of

MAX_TURN = 24  # items in one turn
Where: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """Items that are repeated, for each turn in order.

    Attributes:
        turns: the items of each turn.
        carried: for each value that a turn hands to the next: what the first turn reads, and what
            each turn makes of it.
        start: the number in the paths of the first turn's modules. stride: how much it grows.
    """

    turns: tuple[tuple[Item, ...], ...]
    carried: tuple[tuple[str, tuple[str, ...]], ...]
    start: int
    stride: int

    @property
    def takes(self) -> tuple[str, ...]:
        """Values that the loop reads from outside."""
        inside = {value for turn in self.turns for item in turn for value in gives_of(item)}
        read = (value for turn in self.turns for item in turn for value in takes_of(item))
        return tuple(dict.fromkeys(value for value in read if value not in inside))

    @property
    def gives(self) -> tuple[str, ...]:
        """Values that the loop leaves: the last turn's."""
        return tuple(value for item in self.turns[-1] for value in gives_of(item))


Step: TypeAlias = Item | Loop


@dataclass(frozen=True)
class Roller:
    """Find the loops of one function.

    Attributes:
        items: of the function, in order.
        gives: values that the function returns.
        mark: what must agree between turns besides the item itself; None bars it from loops.
    """

    items: Sequence[Item]
    gives: frozenset[str]
    mark: Callable[[Item], object | None]

    def steps(self) -> list[Step]:
        """Return the items, with those that repeat as loops."""
        patterns = [_pattern(item, self.mark(item)) for item in self.items]
        found: list[Step] = []
        start = 0
        while start < len(self.items):
            loop = self._best(patterns, start)
            if loop is None:
                found.append(self.items[start])
                start += 1
            else:
                found.append(loop)
                start += len(loop.turns) * len(loop.turns[0])
        return found

    def _best(self, patterns: Sequence[object], start: int) -> Loop | None:
        best: Loop | None = None
        saved = 0
        if patterns[start] is None:
            return None
        for length in range(1, min(MAX_TURN, (len(self.items) - start) // 2) + 1):
            if patterns[start + length - 1] is None:
                break
            count = _count(patterns, start, length)
            if (count - 1) * length <= saved:
                continue
            loop = self._loop(start, length, count)
            if loop is not None and (len(loop.turns) - 1) * length > saved:
                best, saved = loop, (len(loop.turns) - 1) * length
        return best

    def _loop(self, start: int, length: int, count: int) -> Loop | None:
        """Return the loop with the most turns up to `count`, if there is one with two or more."""
        turns = [
            tuple(self.items[start + t * length : start + (t + 1) * length]) for t in range(count)
        ]
        numbers = _numbering(turns)
        count = min(count, numbers[2])
        while count > 1:
            wiring = self._wiring(turns[:count], start, length)
            if isinstance(wiring, tuple):
                return Loop(tuple(turns[:count]), wiring, numbers[0], numbers[1])
            count = min(count - 1, wiring)
        return None

    def _wiring(
        self, turns: Sequence[tuple[Item, ...]], start: int, length: int
    ) -> tuple[tuple[str, tuple[str, ...]], ...] | int:
        """Return what is carried; or how many turns to try instead."""
        made = [
            {v: (i, j) for i, item in enumerate(turn) for j, v in enumerate(gives_of(item))}
            for turn in turns
        ]
        carried: dict[str, tuple[int, int] | None] = {}
        for t in range(1, len(turns)):
            for i, item in enumerate(turns[t]):
                for a, b in zip(_reads(turns[0][i]), _reads(item), strict=True):
                    if not _agree(a, b, t, made, carried):
                        return t
        values = [list(found) for found in made]
        end = start + len(turns) * length
        if self._leaks(values[:-1], made, carried, end):
            return len(turns) - 1
        places = {place: v for v, place in made[0].items()}
        return tuple(
            (first, tuple(_at(found, place) for found in made))
            for first, place in carried.items()
            if place is not None and place in places
        )

    def _leaks(
        self,
        values: Sequence[Sequence[str]],
        made: Sequence[Mapping[str, tuple[int, int]]],
        carried: Mapping[str, tuple[int, int] | None],
        end: int,
    ) -> bool:
        """Whether something after the loop reads what an earlier turn made."""
        inner = {value for turn in values for value in turn}
        later = {value for item in self.items[end:] for value in takes_of(item)}
        places = [place for place in carried.values() if place is not None]
        return bool(inner & (later | self.gives)) or len(set(places)) < len(places)


def _at(found: Mapping[str, tuple[int, int]], place: tuple[int, int]) -> str:
    return next(value for value, other in found.items() if other == place)


def _agree(
    a: str,
    b: str,
    turn: int,
    made: Sequence[Mapping[str, tuple[int, int]]],
    carried: dict[str, tuple[int, int] | None],
) -> bool:
    """Whether turn 0 reads `a` where this turn reads `b`, in a way that a loop can say."""
    if a in made[0]:
        return made[turn].get(b) == made[0][a]
    if b in made[turn]:
        return False
    if b in made[turn - 1]:
        return carried.setdefault(a, made[turn - 1][b]) == made[turn - 1][b]
    return a == b and carried.setdefault(a, None) is None


def _count(patterns: Sequence[object], start: int, length: int) -> int:
    """Return how often the patterns from `start` repeat."""
    first = patterns[start : start + length]
    if any(pattern is None for pattern in first):
        return 1
    count = 1
    while list(patterns[start + count * length : start + (count + 1) * length]) == list(first):
        count += 1
    return count


def _pattern(item: Item, mark: object | None) -> object | None:
    """Return what is the same in every turn: all but values, and numbers in paths."""
    if mark is None:
        return None
    if not isinstance(item, Op):
        extra: object = len(item.takes)
        if isinstance(item, LayerCall):
            extra = item.layer.name, len(item.inputs), item.returned
        return type(item), _plain(item.module.path), extra, len(item.gives), mark
    if item.random or item.mutates or item.body is not None or item.checks:
        return None
    kwargs = tuple((name, _skeleton(value)) for name, value in item.kwargs)
    return item.target, tuple(map(_skeleton, item.args)), kwargs, mark


def _skeleton(arg: Arg) -> object:
    match arg:
        case Ref():
            return "value"
        case ParamRef(param=name):
            return "param", _plain(name)
        case tuple():
            return tuple(map(_skeleton, arg))
    return repr(arg)


def _plain(path: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in path.split("."))


def _reads(item: Item) -> list[str]:
    """Return the values that an item reads, once for each place."""
    if isinstance(item, Op):
        return [
            arg.value
            for arg in leaves((*item.args, *(value for _, value in item.kwargs)))
            if isinstance(arg, Ref)
        ]
    return list(item.takes)


def _paths(item: Item) -> list[str]:
    return list(params_of(item)) if isinstance(item, Op) else [item.module.path]


def _numbering(turns: Sequence[tuple[Item, ...]]) -> tuple[int, int, int]:
    """Return the first number in the paths, how it grows, and for how many turns it does."""
    paths = [[path for item in turn for path in _paths(item)] for turn in turns]
    if len(paths) < 2 or len(paths[0]) != len(paths[1]):
        return 0, 0, 0
    moves = [changed(a, b) for a, b in zip(paths[0], paths[1], strict=True)]
    strides = {new - old for move in moves for _, old, new in move or ()}
    if any(move is None or len(move) > 1 for move in moves) or len(strides) != 1:
        return 0, 0, 0
    (stride,) = strides
    start = min(old for move in moves for _, old, _ in move or ())
    count = 2
    while count < len(paths) and paths[count] == [
        _shifted(path, move, count) for path, move in zip(paths[0], moves, strict=True)
    ]:
        count += 1
    return start, stride, count if stride > 0 else 0


def _shifted(path: str, move: list[tuple[int, int, int]] | None, turn: int) -> str:
    parts = path.split(".")
    for i, old, new in move or ():
        parts[i] = str(old + turn * (new - old))
    return ".".join(parts)


def changed(a: str, b: str) -> list[tuple[int, int, int]] | None:
    """Return (component, number in a, number in b) where paths differ; None if words do."""
    found: list[tuple[int, int, int]] = []
    for i, (left, right) in enumerate(zip(a.split("."), b.split("."), strict=True)):
        if left != right:
            if not (left.isdigit() and right.isdigit()):
                return None
            found.append((i, int(left), int(right)))
    return found
