"""Types of arguments and results, as the author of a module would annotate them.

This module knows what a graph's values are; it knows nothing of how they are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigbrain_fx.core import Graph
from bigbrain_fx.emit.modules.blocks import Number
from bigbrain_fx.planning import is_size

TENSOR = "Tensor"


def value_type(graph: Graph, value: str) -> str:
    """Return the type of an input, of a parameter that is handed on, or of an op's value."""
    op = graph.op.get(value)
    if op is None:
        return TENSOR
    if is_size(op):
        return "int"
    if op.is_tuple:
        return f"tuple[{TENSOR}, ...]"
    return TENSOR if len(op.outputs) == 1 else "object"


def number_type(number: Number) -> str:
    """Return the type of a constructor's argument: a literal, or the shape of a parameter."""
    return "tuple[int, ...]" if isinstance(number, tuple) else type(number).__name__


def signature(name: str, arguments: Mapping[str, str], gives: Sequence[str] = ()) -> str:
    """Return `def forward(self, x: Tensor) -> Tensor:`; `arguments` are types by name."""
    taken = ", ".join(["self", *(f"{key}: {kind}" for key, kind in arguments.items())])
    return f"def {name}({taken}) -> {returned(gives)}:"


def returned(gives: Sequence[str]) -> str:
    """Return the type of what a function of our own returns: one value bare, several as a tuple."""
    if len(gives) == 1:
        return gives[0]
    return f"tuple[{', '.join(gives) or '()'}]"
