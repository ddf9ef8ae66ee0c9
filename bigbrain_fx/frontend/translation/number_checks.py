"""Checks that compare a tensor's number and raise: the tensor itself may be compared instead.

    assert lengths.max().item() <= size          if x.abs().max().item() > 6: raise ValueError(...)

A trace has no number to compare. Compared as a tensor it is a question for yes or no, which the
oracle answers and a bundle keeps. Of a line that does more with the number, nothing is said. This
file reads lines.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)


def only_compares(file: str, line: int) -> bool:
    """Whether all numbers that a line asks tensors for by `.item()` are compared, and may raise."""
    return line in _lines(file)


@functools.cache
def _lines(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    tests = [test for node in ast.walk(tree) if (test := _test(node)) is not None]
    return frozenset(number for test in tests if _is_plain(test) for number in _of(test))


def _test(node: ast.AST) -> ast.expr | None:
    """Return what an assert, or an `if` that does nothing but raise, goes by."""
    if isinstance(node, ast.Assert):
        return node.test
    raises = isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
    return node.test if isinstance(node, ast.If) and raises and not node.orelse else None


def _of(test: ast.expr) -> range:
    return range(test.lineno, 1 + (test.end_lineno or test.lineno))


def _is_plain(test: ast.expr) -> bool:
    asked = {id(node) for node in ast.walk(test) if _asks(node)}
    return bool(asked) and asked == {id(node) for node in _compared(test)}


def _asks(node: ast.AST) -> bool:
    """Whether it is `tensor.item()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "item"
        and not node.args
    )


def _compared(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the calls of `.item()` that comparisons have on a side, by themselves or in a sum."""
    match test:
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _compared(part)
        case ast.UnaryOp(ast.Not(), inner):
            yield from _compared(inner)
        case ast.Compare(left, ops, others) if all(isinstance(op, _ORDERS) for op in ops):
            for side in (left, *others):
                yield from _summed(side)


def _summed(side: ast.expr) -> Iterator[ast.expr]:
    if _asks(side):
        yield side
    if isinstance(side, ast.BinOp) and isinstance(side.op, _SUMS):
        yield from _summed(side.left)
        yield from _summed(side.right)
