"""Expressions that a backward recomputes: `F.gelu(h)` becomes `again(F.gelu, h)`.

    self.norm(x)           again(self.norm, x)
    F.silu(gate) * up      again(lambda a, up: a * up, again(F.silu, gate), up)

A recomputed function reads only its arguments and `self`: every local that an expression reads is
an argument. No later turn of a loop, and no name that is used again, can then change it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from string import ascii_lowercase

AGAIN = "again"
WIDENED = "widened"
_GLOBALS = frozenset({"F", "math", "nn", "self", "torch", WIDENED})


def made_again(expression: ast.expr) -> ast.expr:
    """Return the call of `again` that gives what an expression gives."""
    if isinstance(expression, ast.Call) and _is_plain(expression):
        return ast.Call(ast.Name(AGAIN), [expression.func, *expression.args], [])
    read = list(dict.fromkeys(_locals(expression)))
    given = dict(zip(read, _parameters(read), strict=True))
    body = _Renamed(given).visit(copy.deepcopy(expression))
    parameters = [ast.arg(name) for name in given.values()]
    function = ast.Lambda(ast.arguments([], parameters, None, [], [], None, []), body)
    return ast.Call(ast.Name(AGAIN), [function, *map(ast.Name, read)], [])


def widened_again(expression: ast.expr) -> ast.expr:
    """Return the call of `again` for a float weight, `weight * scale`, of an int8 one."""
    if not isinstance(expression, ast.BinOp):
        return made_again(expression)
    both = [expression.left, expression.right]
    return ast.Call(ast.Name(AGAIN), [ast.Name(WIDENED), *both], [])


def _is_plain(call: ast.Call) -> bool:
    """Whether a call names its function, and its arguments need no look inside."""
    return not call.keywords and _is_name(call.func) and all(map(_is_argument, call.args))


def _is_name(function: ast.expr) -> bool:
    """Whether it is `F.gelu` or `self.norm`, and no method of a tensor."""
    while isinstance(function, ast.Attribute | ast.Subscript):
        function = function.value
    return isinstance(function, ast.Name) and function.id in _GLOBALS


def _is_argument(arg: ast.expr) -> bool:
    return not any(isinstance(node, ast.Tuple | ast.List) for node in ast.walk(arg)) or not any(
        _locals(arg)
    )


def _locals(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression reads, in the order in which Python evaluates them."""
    if isinstance(node, ast.Name) and node.id not in _GLOBALS:
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _locals(child)


def _parameters(read: list[str]) -> Iterator[str]:
    """Yield a parameter for each: its own name, or a letter for what has none yet."""
    taken = {name for name in read if not name.startswith("<")}
    letters = (letter for letter in ascii_lowercase if letter not in taken)
    return (next(letters) if name.startswith("<") else name for name in read)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names.get(node.id, node.id))
