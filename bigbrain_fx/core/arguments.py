"""Arguments of an op: literals, references to values and to parameters, and lists of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

from typing_extensions import TypeAliasType


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the output of an op, or a model input."""

    value: str


@dataclass(frozen=True, slots=True)
class ParamRef:
    """An argument that is a parameter, a buffer or a constant, by its name in the user's model."""

    param: str


@dataclass(frozen=True, slots=True)
class Const:
    """An argument that JSON has no word for.

    One of: "torch.float32" (dtypes, layouts and memory formats by their torch name), "device" (the
    stage's own device), "inf", "-inf", "nan", "1j".
    """

    const: str

    @property
    def number(self) -> complex:
        """The number that the literal stands for, where it is one."""
        return complex(self.const) if "j" in self.const else float(self.const)


Arg = TypeAliasType(  # a literal, a reference, or a list of arguments
    "Arg", Union[bool, int, float, str, Ref, ParamRef, Const, "tuple[Arg, ...]", None]
)


def leaves(args: tuple[Arg, ...]) -> Iterator[Arg]:
    """Yield every argument that is no list, in order, through any nesting."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from leaves(arg)
        else:
            yield arg
