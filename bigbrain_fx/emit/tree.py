"""The tree of a module's children and tensors -> `super().__init__(...)` of its class.

This room knows how children are named and numbered; what a tensor looks like is given to it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeAlias

from bigbrain_fx.emit.expressions import child_key
from bigbrain_fx.emit.layout import statement
from bigbrain_fx.emit.names import is_attribute

Tree: TypeAlias = dict[str, "ast.expr | Tree"]
"""A module's children by name: a declared tensor or block, or a plain holder of more."""


def put(tree: Tree, path: str, value: ast.expr) -> None:
    """Put a tensor or block at its dotted path into a tree."""
    head, _, rest = path.partition(".")
    if not rest:
        tree[head] = value
        return
    below = tree.setdefault(head, {})
    assert isinstance(below, dict), f"{path} lies inside a tensor"
    put(below, rest, value)


def super_init(tree: Tree, indent: int) -> list[str]:
    """Return the lines of `super().__init__(...)` that declare all of a tree."""
    function = ast.Attribute(ast.Call(ast.Name("super"), [], []), "__init__")
    return statement(ast.Expr(ast.Call(function, *_arguments(tree))), indent)


def _holder(tree: ast.expr | Tree) -> ast.expr:
    if isinstance(tree, ast.expr):
        return tree
    return ast.Call(ast.Name("Tensors"), *_arguments(tree))


def _arguments(tree: Tree) -> tuple[list[ast.expr], list[ast.keyword]]:
    """Return keyword arguments for plain names, and a mapping for names like "0" and "class"."""
    same = _comprehension(tree)
    if same is not None:
        return [same], []
    plain = {name: _holder(value) for name, value in tree.items() if is_attribute(name)}
    odd = {name: _holder(value) for name, value in tree.items() if not is_attribute(name)}
    keywords = [ast.keyword(name, value) for name, value in plain.items()]
    if not odd:
        return [], keywords
    keys: list[ast.expr | None] = [ast.Constant(child_key(name)) for name in odd]
    return [ast.Dict(keys, list(odd.values()))], keywords


def _comprehension(tree: Mapping[str, ast.expr | Tree]) -> ast.expr | None:
    """Return `{i: Block() for i in range(6, 12)}` when children are equal, numbered on end."""
    indices = [key for key in map(child_key, tree) if isinstance(key, int)]
    blocks = [value for value in tree.values() if isinstance(value, ast.Call)]
    if len(tree) < 2 or not len(indices) == len(blocks) == len(tree):
        return None
    texts = {ast.unparse(ast.fix_missing_locations(block)) for block in blocks}
    if len(texts) > 1 or indices != list(range(indices[0], indices[0] + len(indices))):
        return None
    bounds = [ast.Constant(indices[0])] if indices[0] else []
    over = ast.Call(ast.Name("range"), [*bounds, ast.Constant(indices[-1] + 1)], [])
    loop = ast.comprehension(ast.Name("i"), over, [], 0)
    return ast.DictComp(ast.Name("i"), blocks[0], [loop])
