"""Names that a statement of the model's source gives its results: `q, k = f(x)` gives q and k.

The module reads Python's assignments; it does not know graphs.
"""

from __future__ import annotations

import ast
from functools import lru_cache

from bigbrain_fx.emit.modules.names import identifier

IGNORED = "_"


@lru_cache(maxsize=8192)
def targets(statement: str) -> tuple[str, ...]:
    """Return the names that a statement assigns to, in order; nothing when it assigns none.

    `self.cache = x` gives "cache", `out["loss"] = x` gives "loss", `skips.append(x)` gives "skip".
    A part that has no name of its own is "_".
    """
    try:
        body = ast.parse(statement).body
    except SyntaxError:  # the first or last line of a longer statement
        return ()
    match body:
        case [ast.Assign(targets=[target, *_])]:
            return _names(target)
        case [ast.AugAssign(target=target)] | [ast.AnnAssign(target=target)]:
            return _names(target)
        case [ast.Expr(value=ast.Call(func=ast.Attribute(value=holder, attr="append")))]:
            return _member_of(holder)
    return ()


OPERATORS = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}


@lru_cache(maxsize=8192)
def operand(statement: str, kind: str, side: int) -> str | None:
    """Return the variable on one side (0: left) of an operator, if the statement has one such."""
    try:
        tree = ast.parse(statement)
    except SyntaxError:
        return None
    found = [
        (node.left, node.right)[side]
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS.get(kind, ast.MatMult))
    ]
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in found
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return identifier(names.pop()) if len(found) == len(names) == 1 else None


@lru_cache(maxsize=8192)
def argument_name(statement: str, kind: str, where: tuple[str | int, ...]) -> str | None:
    """Return the variable that a statement gives an op as an argument: `x.view(batch, heads, 8)`.

    Args:
        statement: the source.
        kind: name of the op.
        where: (0, position, position in a list ...) of the argument.
    """
    try:
        tree = ast.parse(statement)
    except SyntaxError:
        return None
    if where[0] != 0 or len(where) not in (2, 3) or not isinstance(where[1], int):
        return None
    if kind in OPERATORS:
        name = operand(statement, kind, where[1])
        return None if name is None or len(where) == 3 else name
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == kind
    ]
    if len(calls) != 1:
        return None
    is_function = isinstance(calls[0].func, ast.Attribute) and _is_function(calls[0].func.value)
    return _given(calls[0].args, where[1] if is_function else where[1] - 1, where[2:])


def _is_function(holder: ast.expr) -> bool:
    """Whether `holder.name(...)` is a function of a module rather than a method of a tensor."""
    return isinstance(holder, ast.Name) and holder.id in ("F", "torch", "functional")


def _given(args: list[ast.expr], position: int, inner: tuple[str | int, ...]) -> str | None:
    if inner and len(args) > position >= 0 and isinstance(args[position], ast.Tuple | ast.List):
        args, position = args[position].elts, int(inner[0])  # type: ignore[attr-defined]
    elif inner:
        position += int(inner[0])
    if not 0 <= position < len(args) or any(isinstance(arg, ast.Starred) for arg in args):
        return None
    match args[position]:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return identifier(name)
    return None


@lru_cache(maxsize=8192)
def size_target(statement: str, axis: int) -> str | None:
    """Return the name that a statement gives to one size of a tensor, if it takes sizes."""
    try:
        body = ast.parse(statement).body
    except SyntaxError:
        return None
    match body:
        case [ast.Assign(targets=[target], value=value)] if not isinstance(target, ast.Attribute):
            pairs = _paired(target, value)
            return next((name for name, source in pairs if _reads(source, axis)), None)
    return None


def _paired(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr | int]]:
    """Pair names with what each is given: an expression, or a place in `x.shape`."""
    if not isinstance(target, ast.Tuple):
        name = _name(target)
        return [(name, value)] if name else []
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return [pair for part, source in pairs for pair in _paired(part, source)]
    names = [(_name(element), i) for i, element in enumerate(target.elts)]
    return [(name, i) for name, i in names if name and _is_shape(value)]


def _is_shape(value: ast.expr) -> bool:
    match value:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]):
            return True
    return False


def _reads(source: ast.expr | int, axis: int) -> bool:
    match source:
        case int():
            return source == axis
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=index)):
            return index == axis
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=index)]):
            return index == axis
    return False


def _names(target: ast.expr) -> tuple[str, ...]:
    if isinstance(target, ast.Tuple | ast.List):
        return tuple(name for element in target.elts for name in _parts(element))
    name = _name(target)
    return (name,) if name else ()


def _parts(element: ast.expr) -> tuple[str, ...]:
    """Return the names in one part of `out, (hidden, cell) = ...`, nested ones in their order."""
    is_nested = isinstance(element, ast.Tuple | ast.List)
    return _names(element) if is_nested else (_name(element) or IGNORED,)


def _name(target: ast.expr) -> str | None:
    match target:
        case ast.Name(id="_"):
            return None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return identifier(name)
        case ast.Subscript(slice=ast.Constant(value=str(key))) if key.isidentifier():
            return identifier(key)
    return None


def _member_of(holder: ast.expr) -> tuple[str, ...]:
    name = _name(holder)
    is_plural = name is not None and name.endswith("s") and len(name) > 2
    return (name[:-1],) if name and is_plural else ()
