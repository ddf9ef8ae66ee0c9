"""Lines of a model file whose values are others in each process: sets, hash(), unseeded draws.

A vocabulary that is `list(set(text))` is another one in every process of a bundle, and after each
resume. Where the user's lines have one, a rehearsal's processes have another hash seed. Draws of
Python or NumPy at the top are looked for where a rehearsal has shown a difference.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

SETS = frozenset({"set", "frozenset", "hash"})
UNORDERED = frozenset({"sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset"})
HASH_SEED = "PYTHONHASHSEED"


def line_of_set(path: Path) -> str | None:
    """Return the first such line; None where a PYTHONHASHSEED of the user's holds for all."""
    if os.environ.get(HASH_SEED, "random") != "random":
        return None
    line = next(lines_of_sets(path), None)
    return None if line is None else f"{path.name}:{line}"


def line_of_draw(path: Path) -> str | None:
    """Return the first line at the top that draws without a seed; None where one is set there."""
    body = ast.parse(path.read_bytes()).body
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    calls = [c for node in body if not isinstance(node, defined) for c in _calls_of_random(node)]
    if any(name.endswith("seed") for name, _ in calls):
        return None
    return next((f"{path.name}:{line}" for _, line in calls), None)


def _calls_of_random(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the functions of `random` and `numpy.random` that a statement calls."""
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        name = ast.unparse(call.func)
        if name.removeprefix("np.").removeprefix("numpy.").startswith("random."):
            yield name, call.lineno


def lines_of_sets(path: Path) -> Iterator[int]:
    """Yield the lines on which a file makes a set, or a hash, whose order may count."""
    tree = ast.parse(path.read_bytes())
    harmless = {id(part) for node in ast.walk(tree) for part in _harmless(node)}
    for node in ast.walk(tree):
        if _may_count(node) and id(node) not in harmless:
            yield node.lineno  # type: ignore[attr-defined]  # an expression has a line


def _may_count(node: ast.AST) -> bool:
    match node:
        case ast.Set(elts=items):
            return not all(isinstance(i, ast.Constant) and isinstance(i.value, int) for i in items)
        case ast.Call(func=ast.Name(id=name)):
            return name in SETS
    return isinstance(node, ast.SetComp)


def _harmless(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression whose order it does not show."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in UNORDERED:
            yield first
        case ast.Compare(ops=ops, comparators=parts):
            yield from (
                p for op, p in zip(ops, parts, strict=True) if isinstance(op, ast.In | ast.NotIn)
            )
