"""Fold a value that is used once into the expression that uses it, as its author wrote it.

    transpose = mixed.transpose(1, 2)
    flatten = transpose.flatten(2)            becomes     mixed.transpose(1, 2).flatten(2)

A stack machine, run backwards: values wait, and an expression takes those on top of the stack if it
evaluates them in the order in which they wait. So every op still runs in the order of the graph,
which is what autograd's order of sums depends on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MAX_FOLDED = 72  # characters; longer expressions get a line of their own


@dataclass(frozen=True)
class Waiting:
    """A value that no statement has named yet."""

    value: str
    expression: ast.expr
    source: str


class Folding:
    """The values that wait, oldest first."""

    def __init__(self) -> None:
        self.stack: list[Waiting] = []

    def push(self, waiting: Waiting) -> None:
        """Let a value wait for its one reader."""
        self.stack.append(waiting)

    def clear(self) -> list[Waiting]:
        """Return all that wait, in order, to be written as statements."""
        found, self.stack = self.stack, []
        return found

    def stand_in(self, value: str) -> ast.expr | None:
        """Return what stands for a value until `fold`; None if it does not wait."""
        return ast.Name(_mark(value)) if any(w.value == value for w in self.stack) else None

    def fold(self, expression: ast.expr, source: str) -> ast.expr | None:
        """Put waiting values into an expression.

        Returns:
            The expression without stand-ins; None when its values wait in another order, belong to
            another source line, or would make it too long.
        """
        wanted = [name for name in _names(expression) if name.startswith("<")]
        if not wanted:
            return expression
        top = self.stack[-len(wanted) :]
        if wanted != [_mark(w.value) for w in top] or any(w.source != source for w in top):
            return None
        folded = _Replace({_mark(w.value): w.expression for w in top}).visit(expression)
        assert isinstance(folded, ast.expr)
        del self.stack[-len(wanted) :]
        return folded

    def names(self) -> set[str]:
        """Return the variables that waiting expressions read: they must not be given away."""
        return {name for waiting in self.stack for name in _names(waiting.expression)}


def is_short(expression: ast.expr) -> bool:
    """Whether an expression may stand inside another."""
    return len(ast.unparse(ast.fix_missing_locations(expression))) <= MAX_FOLDED


def _mark(value: str) -> str:
    return f"<{value}>"


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names of an expression in the order in which Python evaluates them."""
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


class _Replace(ast.NodeTransformer):
    def __init__(self, found: dict[str, ast.expr]) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.found.get(node.id, node)
