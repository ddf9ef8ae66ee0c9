"""Numbers, texts and collections of them as Python writes them."""

from __future__ import annotations

import ast
import math


class LiteralError(Exception):
    """Report a value that no text makes; `value` is it."""

    def __init__(self, value: object) -> None:
        super().__init__(f"an object of {type(value).__name__}")
        self.value = value


def literal(value: object) -> ast.expr:
    """Write a number, a text, or a list, tuple, set or dict of such.

    Raises:
        LiteralError: it is something else, or has something else in it.
    """
    if type(value) is float and not math.isfinite(value):
        return called("float", ast.Constant(repr(value)))
    if is_plain(value):
        return ast.parse(repr(value), mode="eval").body
    if type(value) in (list, tuple, set) and value:
        items = [literal(item) for item in value]  # type: ignore[attr-defined]
        if isinstance(value, list):
            return ast.List(items)
        return ast.Tuple(items) if isinstance(value, tuple) else ast.Set(items)
    if type(value) is dict:
        keys, values = ([literal(each) for each in part] for part in (value, value.values()))
        return ast.Dict(list(keys), list(values))
    if type(value) in (list, tuple, set):
        return called(type(value).__name__)
    raise LiteralError(value)


def is_plain(value: object) -> bool:
    """Whether a value is one number or text, or None."""
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def called(function: str | ast.expr, *arguments: ast.expr, **named: ast.expr) -> ast.expr:
    """Write a call."""
    made = ast.Name(function) if isinstance(function, str) else function
    return ast.Call(
        made, list(arguments), [ast.keyword(name, each) for name, each in named.items()]
    )
