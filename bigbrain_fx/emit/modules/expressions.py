"""Small syntax trees: attributes of self, dotted names, literals.

This module knows how Python writes a name or a number; it knows nothing of graphs or functions.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from bigbrain_fx.core import Arg, Const
from bigbrain_fx.emit.modules.names import is_attribute


def member(
    path: str, owner: ast.expr | None = None, numbers: Mapping[int, ast.expr] | None = None
) -> ast.expr:
    """Return `self.blocks[0].attn.weight` for the dotted name `blocks.0.attn.weight`.

    Args:
        path: of a module or tensor below the owner.
        owner: `self` when left out.
        numbers: components of the path that are an expression instead: `self.blocks[i]`.
    """
    expression: ast.expr = owner or ast.Name("self")
    for i, part in enumerate(path.split(".") if path else ()):
        if numbers and i in numbers:
            expression = ast.Subscript(expression, numbers[i])
        elif is_attribute(part):
            expression = attribute(expression, part)
        else:
            expression = ast.Subscript(expression, ast.Constant(child_key(part)))
    return expression


def child_key(name: str) -> int | str:
    """Return the number that a child such as "0" is reached by; other names stay text."""
    return int(name) if name.isdigit() and str(int(name)) == name else name


def function_place(target: str) -> tuple[str, str]:
    """Split `opaque.<module>.<class>` into module and qualified name: classes are capitalised."""
    parts = target.removeprefix("opaque.").split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:first]), ".".join(parts[first:])


def constant(value: Arg) -> ast.expr:
    """Return a literal, torch's name for a dtype, or `float("inf")` and the like."""
    if not isinstance(value, Const):
        return ast.Constant(value)  # type: ignore[arg-type]  # the caller takes references apart
    if value.const.startswith("torch."):
        return dotted(value.const)
    if isinstance(value.number, complex):
        return ast.Constant(value.number)
    return ast.Call(ast.Name("float"), [ast.Constant(value.const)], [])


def dotted(name: str) -> ast.expr:
    """Return the expression of a dotted name."""
    first, *rest = name.split(".")
    expression: ast.expr = ast.Name(first)
    for part in rest:
        expression = attribute(expression, part)
    return expression


def attribute(value: ast.expr, name: str) -> ast.expr:
    """Return `value.name`."""
    return ast.Attribute(value, name)


def tuple_of(values: Sequence[ast.expr]) -> ast.expr:
    """Return the tuple of several values; one value stays as it is."""
    return values[0] if len(values) == 1 else ast.Tuple(list(values))
