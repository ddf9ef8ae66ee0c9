"""Sizes of tensors: numbers, or arithmetic over the batch; and the bytes of element types."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

Dim: TypeAlias = int | str
"""One size: a number, or Python arithmetic over the batch size, such as "B" or "32*B".

"L24" is the length of a batch's rows where that is free: 24 in the longest, which is planned for.
"""

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}

_MONOMIAL = re.compile(r"(?:(\d+)\*)?B(?:\*\*(\d+))?")
_LENGTH = re.compile(r"L(\d+)[a-z]*")


def size_of(dim: Dim, batch: int, lengths: Callable[[str], int] | None = None) -> int:
    """Return the number that `dim` stands for when the batch has `batch` rows.

    `lengths` says what free lengths are, by name; left out, they are the longest.
    """
    if isinstance(dim, int):
        return dim
    return _evaluate(dim, batch) if lengths is None else _number(dim, batch, lengths)


def longest(name: str) -> int:
    """Return the longest that a free length is, by its name: 24 of "L24"."""
    found = _LENGTH.fullmatch(name)
    if found is None:
        raise ValueError(f"not a size: {name}")
    return int(found[1])


def length_name(size: int, number: int) -> str:
    """Name a free length that is `size` in the longest batch; those of one size by number."""
    return f"L{size}{chr(ord('a') + number - 1) if number else ''}"


def is_length(dim: Dim) -> bool:
    """Whether a size is a free length itself."""
    return isinstance(dim, str) and _LENGTH.fullmatch(dim) is not None


def factor(part: Dim) -> str:
    """Return a size as text that stands in a product."""
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
            rest.append(factor(part))
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


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's dimensions from the slowest to the fastest in memory.

    Row by row it is 0, 1, ...; dimensions of one element are wherever that fits.
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    real = [dim for dim in order if shape[dim] != 1]
    return tuple(range(len(shape))) if real == sorted(real) else order


def dense_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the strides of a tensor that lies row by row."""
    found: list[Dim] = []
    step: Dim = 1
    for n in reversed(shape):
        found.append(step)
        step = _times(step, n)
    return tuple(reversed(found))


def _times(step: Dim, n: Dim) -> Dim:
    if isinstance(step, int) and isinstance(n, int):
        return step * max(n, 1)  # as torch counts: an empty tensor has strides, too
    return f"({step})*({n})"


@lru_cache(maxsize=65536)
def _evaluate(expression: str, batch: int) -> int:
    return _number(expression, batch, longest)


def _number(expression: str, batch: int, lengths: Callable[[str], int]) -> int:
    return _evaluate_node(ast.parse(expression, mode="eval").body, batch, lengths)


def _evaluate_node(node: ast.expr, batch: int, lengths: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id="B"):
            return batch
        case ast.Name(id=name):
            return lengths(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate_node(operand, batch, lengths)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = (_evaluate_node(side, batch, lengths) for side in (left, right))
            return _apply(op, a, b)
        case ast.Call(func=ast.Name(id="Max" | "Min" as name), args=args):
            values = [_evaluate_node(arg, batch, lengths) for arg in args]
            return max(values) if name == "Max" else min(values)
    raise ValueError(f"not a size: {ast.unparse(node)}")


def _apply(op: ast.operator, a: int, b: int) -> int:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
        case ast.Pow():
            return int(a**b)
    raise ValueError(f"not an operator of sizes: {type(op).__name__}")
