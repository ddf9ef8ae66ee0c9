"""Sizes as text: torch's symbolic sizes -> arithmetic over "B" and free lengths, "L24".

Graphs of this package hold no sympy objects. This file knows no ops and no modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from bigbrain_fx.core import Dim, factor, times

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]  # sympy ships no types
    import torch
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_LENGTHS: WeakKeyDictionary[ShapeEnv, dict[sympy.Symbol, sympy.Symbol]] = WeakKeyDictionary()


def know_lengths(env: ShapeEnv | None, names: Mapping[sympy.Symbol, str]) -> None:
    """Let symbols of a trace be free lengths of these names; all others are the batch."""
    from sympy import Symbol

    if env is not None and names:
        made = {s: Symbol(name, integer=True, positive=True) for s, name in names.items()}
        _LENGTHS[env] = made


def env_of(program: ExportedProgram) -> ShapeEnv | None:
    """Return the object in which a trace records its guards."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    mode = next((m for v in values if (m := getattr(v, "fake_mode", None)) is not None), None)
    return None if mode is None else mode.shape_env


class UnknownSizeError(Exception):
    """Report a size that is not arithmetic over the batch: it depends on the data."""


def dim(size: int | torch.SymInt) -> Dim:
    """Return a size as a number, or as arithmetic over the batch "B".

    Every backed symbol stands for the batch, but for free lengths (`know_lengths`).

    Raises:
        UnknownSizeError: the size depends on data (the length of `nonzero`, say).
    """
    if isinstance(size, int):
        return size
    node = size.node
    names = _LENGTHS.get(node.shape_env, {})
    try:
        return _text_of(_named(node._expr, names))  # as traced: no replacement work per node
    except UnknownSizeError:
        return _text_of(_named(node.expr, names))


def _named(expression: sympy.Expr, names: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Expr:
    return expression.xreplace(names) if names else expression


@lru_cache(maxsize=65536)
def _text_of(expression: sympy.Expr) -> Dim:
    if expression.is_Integer:
        return int(expression)
    return _text(expression)


def _text(expression: sympy.Expr) -> str:
    """Write one expression; `//`, `%` and sums stand in parentheses inside others."""
    kind = type(expression).__name__
    parts = [_text_of(cast("sympy.Expr", arg)) for arg in expression.args]
    match kind:
        case "Symbol" if str(expression).startswith("s"):
            return "B"
        case "Symbol" if str(expression).startswith("L"):
            return str(expression)
        case "Add":
            return " + ".join(str(part) for part in _numbers_last(parts))
        case "Mul":
            return str(times(*parts))
        case "Pow" if isinstance(parts[1], int) and parts[1] > 0:
            return f"{factor(parts[0])}**{parts[1]}"
        case "FloorDiv" | "CleanDiv":
            return f"({factor(parts[0])}//{factor(parts[1])})"
        case "Mod" | "PythonMod":
            return f"({factor(parts[0])}%{factor(parts[1])})"
        case "Max" | "Min":
            return f"{kind}({', '.join(str(part) for part in parts)})"
    raise UnknownSizeError(f"size {expression} is not arithmetic over the batch")


def _numbers_last(parts: list[Dim]) -> list[Dim]:
    return sorted(parts, key=lambda part: isinstance(part, int))
