"""Sizes as text: torch's symbolic sizes -> arithmetic over "B", and products and sums of such text.

The graph that leaves this room holds no sympy objects. This file knows no ops and no modules.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from bigbrain_fx.core import Dim

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]  # sympy ships no types
    import torch

_MONOMIAL = re.compile(r"(?:(\d+)\*)?B(?:\*\*(\d+))?")


class UnknownSizeError(Exception):
    """Report a size that is not arithmetic over the batch: it depends on the data."""


def dim(size: int | torch.SymInt) -> Dim:
    """Return a size as a number, or as arithmetic over the batch "B".

    Every backed symbol stands for the batch: only dimension 0 of batched inputs is symbolic.

    Raises:
        UnknownSizeError: the size depends on data (the length of `nonzero`, say).
    """
    if isinstance(size, int):
        return size
    node = size.node
    try:
        return _text_of(node._expr)  # the expression as traced: no replacement work per node
    except UnknownSizeError:
        return _text_of(node.expr)


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
        case "Add":
            return " + ".join(str(part) for part in _numbers_last(parts))
        case "Mul":
            return str(times(*parts))
        case "Pow" if isinstance(parts[1], int) and parts[1] > 0:
            return f"{_factor(parts[0])}**{parts[1]}"
        case "FloorDiv" | "CleanDiv":
            return f"({_factor(parts[0])}//{_factor(parts[1])})"
        case "Mod" | "PythonMod":
            return f"({_factor(parts[0])}%{_factor(parts[1])})"
        case "Max" | "Min":
            return f"{kind}({', '.join(str(part) for part in parts)})"
    raise UnknownSizeError(f"size {expression} is not arithmetic over the batch")


def _numbers_last(parts: list[Dim]) -> list[Dim]:
    return sorted(parts, key=lambda part: isinstance(part, int))


def _factor(part: Dim) -> str:
    text = str(part)
    return text if text.isalnum() or re.fullmatch(r"\([^()]*\)", text) else f"({text})"


def times(*dims: Dim) -> Dim:
    """Multiply sizes: `times(2, "32*B", 8)` is "512*B"."""
    count, power, rest = 1, 0, []
    for part in dims:
        if isinstance(part, int):
            count *= part
        elif (monomial := _MONOMIAL.fullmatch(part)) is not None:
            count *= int(monomial[1] or 1)
            power += int(monomial[2] or 1)
        else:
            rest.append(_factor(part))
    if count == 0:
        return 0
    symbols = [*(["B" if power == 1 else f"B**{power}"] if power else []), *rest]
    if not symbols:
        return count
    return "*".join(symbols if count == 1 else [str(count), *symbols])


def plus(*dims: Dim) -> Dim:
    """Add sizes, like terms together: `plus("32*B", "B", 4)` is "33*B + 4"."""
    number = 0
    powers: dict[int, int] = {}
    rest: list[str] = []
    for part in dims:
        for term in [part] if isinstance(part, int) or "(" in part else part.split(" + "):
            if isinstance(term, int) or term.isdigit():
                number += int(term)
            elif (monomial := _MONOMIAL.fullmatch(term)) is not None:
                power = int(monomial[2] or 1)
                powers[power] = powers.get(power, 0) + int(monomial[1] or 1)
            else:
                rest.append(term)
    terms = [str(times(n, *["B"] * power)) for power, n in sorted(powers.items(), reverse=True)]
    if not terms and not rest:
        return number
    return " + ".join([*terms, *rest, *([str(number)] if number else [])])


def product(shape: tuple[Dim, ...]) -> Dim:
    """Return the number of elements of a shape."""
    return times(*shape)
