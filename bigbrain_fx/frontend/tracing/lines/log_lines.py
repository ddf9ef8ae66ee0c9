"""Lines of the user's own that only say a number: what they print changes nothing that is computed.

    print(f"max {h.max():.3f}")         log.info("norm %g", h.norm().item())

A trace has no numbers, and such a line would end it. It is told ones, and says so; a bundle has no
such line. What is asked for anything else is asked in earnest. This file reads lines.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping

import numpy
import torch
from torch import Tensor

_SAYING = frozenset(("debug", "info", "warning", "error", "critical", "exception", "warn", "write"))
_OF_TEXT = frozenset(("format", "join", "ljust", "rjust"))
_BUILTIN = frozenset(("float", "int", "round", "str", "repr", "format", "len", "abs", "tuple"))


def only_says(file: str, line: int) -> int | None:
    """Return where a statement begins that prints or logs and does nothing else; of another, None.

    `line` is any line of it.
    """
    return _lines(file).get(line)


@functools.cache
def _lines(file: str) -> Mapping[int, int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and _says(node.value)]
    inside = {id(part) for node in said for part in ast.walk(node)}
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    others = {number for node in parts if id(node) not in inside for number in _of(node)}
    return {n: node.lineno for node in said for n in _of(node) if n not in others}


def _of(node: ast.expr | ast.Expr) -> range:
    return range(node.lineno, 1 + (node.end_lineno or node.lineno))


def _says(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    match call.func:
        case ast.Name("print"):
            pass
        case ast.Attribute(owner, name) if name in _SAYING and ast.unparse(owner) != "self":
            pass
        case _:
            return False
    given = [*call.args, *(word.value for word in call.keywords)]
    return all(_is_harmless(node) for arg in given for node in ast.walk(arg))


def _is_harmless(node: ast.AST) -> bool:
    """Whether a part of what is printed binds no name and calls nothing but torch's own."""
    if not isinstance(node, ast.Call):
        return not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
    match node.func:
        case ast.Name(name):
            return name in _BUILTIN and hasattr(builtins, name)
        case ast.Attribute(_, name):
            own = name in _OF_TEXT or hasattr(Tensor, name) or hasattr(torch, name)
            return own and not name.endswith("_")
    return False


def number_for(func: Callable[..., object], tensor: Tensor, rest: tuple[object, ...]) -> object:
    """Return what a line that only says is told: ones, in the form in which it asks."""
    kind = tensor.dtype
    one = 1.0 if kind.is_floating_point else 1j if kind.is_complex else 1
    if func.__name__ == "__format__":
        return format(one, *map(str, rest))
    if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
        ones = numpy.full(tuple(_sizes(tensor)), one)  # torch would make one of the trace's
        return ones.tolist() if func is Tensor.tolist else ones
    if func in (Tensor.__bool__, Tensor.__int__, Tensor.__index__):
        return func is Tensor.__bool__ or 1
    return one


def _sizes(tensor: Tensor) -> Iterator[int]:
    """Yield its sizes; of a free one that of the example, which asking would make fixed."""
    for size in tensor.shape:
        node = getattr(size, "node", None)
        yield size if node is None else node.hint
