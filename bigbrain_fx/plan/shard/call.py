"""An op as a rule sees it: its arguments, the dimensions of what it reads, and what a rule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from bigbrain_fx.core import Arg, Op, ParamRef, Ref, leaves
from bigbrain_fx.plan.shard.factors import Dims, Factor, flat


@dataclass(frozen=True, slots=True)
class Ruled:
    """What an op does to dimensions.

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
        for arg in leaves((*self.op.args, *self.keywords.values())):
            if isinstance(arg, Ref | ParamRef) and arg in self.known:
                yield self.known[arg]


Rule: TypeAlias = Callable[[ShardCall], Ruled]


def tag(factors: Iterable[Factor], name: str) -> None:
    """Note what factors are: heads, hidden units, ..."""
    for factor in factors:
        factor.root.tags.add(name)
        tag(flat(factor.root.pieces), name)
