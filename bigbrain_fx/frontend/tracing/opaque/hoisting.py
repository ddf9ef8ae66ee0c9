"""Hoisting: calls of modules, and their arguments, each as a statement of its own.

    return self.head(pool(self.body(x)))        body = self.body(x)
                                          ─▶    given = pool(body)
                                                return self.head(given)

Python's order of evaluation is preserved: only names and attributes are evaluated before such a
call. This file knows Python's syntax.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, TypeGuard

_PLAIN = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return
_IN_ORDER = (
    *(ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Attribute),
    *(ast.Subscript, ast.Slice, ast.Starred, ast.Name, ast.Constant, ast.expr_context),
    *(ast.operator, ast.unaryop),
)
"""What Python evaluates in the order of the fields, each of them."""
_AS_IS = ast.Name | ast.Constant | ast.Attribute


def hoisted(statement: ast.stmt, own: str, taken: set[str]) -> list[ast.stmt]:
    """Return a statement after new statements for its calls of modules.

    Args:
        statement: of a function.
        own: the function's name for its module, "self".
        taken: names of the function; the results' names are added.
    """
    before = list[ast.stmt]()
    value: Any = getattr(statement, "value", None)
    if not isinstance(statement, _PLAIN) or value is None:
        return [statement]
    while (part := _first_part(value, own)) is not None:
        name = _fresh(_name_of(part, own), taken)
        target = ast.copy_location(ast.Name(name, ast.Store()), part)
        before.append(ast.copy_location(ast.Assign([target], part), part))
        used = ast.copy_location(ast.Name(name, ast.Load()), part)
        value = _Exchanged(part, used).visit(value)
        statement = copy.copy(statement)
        statement.value = value
    return [*before, statement]


def _first_part(value: ast.expr, own: str) -> ast.expr | None:
    """Return the first evaluated call of a module, or the argument of such a call."""
    call = next(_calls(value), None)
    if call is not value and is_call_of(call, own):
        return call
    given = list[ast.expr]()
    if is_call_of(value, own):
        given = [*value.args, *(word.value for word in value.keywords)]
    computed = [each for each in given if not isinstance(each, _AS_IS)]
    return computed[0] if computed and not any(map(_has_star, given)) else None


def _has_star(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def _name_of(part: ast.expr, own: str) -> str:
    return part.func.attr if is_call_of(part, own) else "given"  # type: ignore[attr-defined]


def is_call_of(node: object, own: str) -> TypeGuard[ast.Call]:
    """Whether a node is a call of an attribute's value: self.embed(x)."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id == own


def _calls(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the calls in the order of evaluation, up to an expression that may not be evaluated."""
    if not isinstance(node, _IN_ORDER):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


class _Exchanged(ast.NodeTransformer):
    """Put a name in the place of one expression."""

    def __init__(self, part: ast.expr, name: ast.Name) -> None:
        self.part, self.name = part, name

    def visit(self, node: ast.AST) -> ast.AST:
        """Exchange it."""
        return self.name if node is self.part else self.generic_visit(node)


def _fresh(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number, found = number + 1, f"{name}_{number + 1}"
    taken.add(found)
    return found
