"""Names that statements of a function assign and read, by their text.

This file knows Python's syntax; it knows no modules.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import cast

_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_CHANGING = ("append", "extend", "insert", "update", "setdefault", "pop", "clear")


def attributes(
    nodes: Sequence[ast.stmt], own: str, context: type[ast.expr_context] = ast.expr_context
) -> set[str]:
    """Return the attributes of a name in statements: `self.rnn`, and of `self.h = h` too."""
    return {
        node.attr
        for each in nodes
        for node in ast.walk(each)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context)
        if isinstance(node.value, ast.Name) and node.value.id == own
    }


def attribute_chains(nodes: Sequence[ast.stmt], own: str) -> set[tuple[str, ...]]:
    """Return the attribute chains of a name: ("embed", "weight") of self.embed.weight."""
    walked = [node for each in nodes for node in ast.walk(each) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in walked}
    found = set[tuple[str, ...]]()
    for node in (node for node in walked if id(node) not in inner):
        chain, at = list[str](), cast("ast.expr", node)
        while isinstance(at, ast.Attribute):
            chain.insert(0, at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id == own:
            found.add(tuple(chain))
    return found


def escapes(nodes: Sequence[ast.stmt], own: str) -> bool:
    """Whether a name is used otherwise than for its attributes."""
    walked = [node for each in nodes for node in ast.walk(each)]
    bases = {id(node.value) for node in walked if isinstance(node, ast.Attribute)}
    return any(
        isinstance(node, ast.Name) and node.id == own and id(node) not in bases for node in walked
    )


def names(nodes: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the names that statements assign, and the names that they read."""
    stored, loaded = set[str](), set[str]()
    waiting: list[tuple[ast.AST, bool]] = [(node, False) for node in nodes]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Name):
            is_own = isinstance(node.ctx, ast.Load) or inside
            (loaded if is_own else stored).add(node.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            loaded.add(node.target.id)
        if (changed := _changed_by(node)) is not None:
            stored.add(changed)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not inside:
            stored.add(node.name)
        inner = inside or isinstance(node, _SCOPES | _COMPREHENSIONS)
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return stored, loaded


def _changed_by(node: ast.AST) -> str | None:
    """Return the name of a container that an expression changes: found.append(x), found[k] = x."""
    held = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        held = node.func.value if node.func.attr in _CHANGING else None
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        held = node.value
    return held.id if isinstance(held, ast.Name) else None


def of_methods(code: types.CodeType) -> list[str]:
    """Return all attribute names in a method's code; some are of other objects."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for each in inner for name in of_methods(each))]
