"""Fold a value that is used once into the expression that uses it, as its author wrote it.

    transpose = mixed.transpose(1, 2)
    flatten = transpose.flatten(2)            becomes     mixed.transpose(1, 2).flatten(2)

A stack machine, run backwards: values wait, and an expression takes those on top of the stack. It
does so if it evaluates them in the order in which they wait. Every op then still runs in the order
of the graph, on which autograd's order of sums depends.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MAX_FOLDED = 88  # characters; longer expressions get a line of their own


@dataclass(frozen=True)
class Piece:
    """An expression on its way to a statement.

    Attributes:
        key: the `self.seeded(...)` under which its one own draw stands; None if it draws nothing.
        draws_inside: it calls classes that draw, under keys of their own.
        source: the user's line.
    """

    expression: ast.expr
    source: str = ""
    key: ast.expr | None = None
    draws_inside: bool = False


@dataclass(frozen=True)
class Waiting:
    """A value that no statement has named yet."""

    value: str
    piece: Piece


class Folding:
    """The values that wait, oldest first."""

    def __init__(self) -> None:
        self.stack: list[Waiting] = []
        self.at_hand: ast.expr | None = None

    def push(self, value: str, piece: Piece) -> None:
        """Let a value wait for its one reader."""
        self.stack.append(Waiting(value, piece))

    def take_first(self) -> Waiting | None:
        """Return the value that waits longest, to be written as a statement; None if none does."""
        return self.stack.pop(0) if self.stack else None

    def stand_in(self, value: str) -> ast.expr | None:
        """Return what stands for a value until `fold`; None if it does not wait."""
        return ast.Name(_mark(value)) if any(w.value == value for w in self.stack) else None

    def fold(self, piece: Piece) -> Piece | None:
        """Put waiting values into an expression.

        Returns:
            The expression without stand-ins; None when its values wait in another order, or when
            two draws would stand under one key.
        """
        wanted = [name for name in _names(piece.expression) if name.startswith("<")]
        if not wanted:
            return piece
        top = self.stack[-len(wanted) :]
        if wanted != [_mark(w.value) for w in top]:
            return None
        pieces = [*(w.piece for w in top), piece]
        keys = [p.key for p in pieces if p.key is not None]
        inside = any(p.draws_inside for p in pieces)
        if len(keys) > 1 or (keys and inside):
            return None
        folded = _Replace({_mark(w.value): w.piece.expression for w in top}).visit(piece.expression)
        assert isinstance(folded, ast.expr)
        del self.stack[-len(wanted) :]
        return Piece(folded, piece.source, keys[0] if keys else None, inside)

    def hold(self, expression: ast.expr | None) -> None:
        """Keep the variables of an expression that is about to be written, after all that wait."""
        self.at_hand = expression

    def names(self) -> set[str]:
        """Return the variables that waiting expressions read: they must not be given away."""
        read = [waiting.piece.expression for waiting in self.stack]
        read += [] if self.at_hand is None else [self.at_hand]
        return {name for expression in read for name in _names(expression)}


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
