"""The tree of a module's children and tensors -> the lines of its `__init__`.

This room knows how children are named and numbered; how each is made is given to it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from bigbrain_fx.core import Param
from bigbrain_fx.emit.expressions import attribute, child_key, dotted
from bigbrain_fx.emit.layout import statement
from bigbrain_fx.emit.names import is_attribute

Tree: TypeAlias = dict[str, "ast.expr | Tree"]
"""A module's children by name: a module or declared tensor, or a plain holder of more."""
MAX_PERIOD = 4  # layers that take turns


def put(tree: Tree, path: str, value: ast.expr) -> None:
    """Put a tensor or block at its dotted path into a tree."""
    head, _, rest = path.partition(".")
    if not rest:
        tree[head] = value
        return
    below = tree.setdefault(head, {})
    assert isinstance(below, dict), f"{path} lies inside a tensor"
    put(below, rest, value)
    if all(isinstance(child_key(name), int) for name in below):  # loops run over them in order
        tree[head] = dict(sorted(below.items(), key=lambda entry: int(entry[0])))


def init_lines(tree: Tree, indent: int) -> list[str]:
    """Return `super().__init__()` and a line for each child."""
    start = ast.Call(attribute(ast.Call(ast.Name("super"), [], []), "__init__"), [], [])
    lines = statement(ast.Expr(start), indent)
    for name, value in tree.items():
        if is_attribute(name):
            target = attribute(ast.Name("self"), name)
            for node in _assigned(target, name, value):
                lines += statement(node, indent)
    odd = {name: value for name, value in tree.items() if not is_attribute(name)}
    if odd:
        hold = ast.Call(attribute(ast.Name("self"), "hold"), [_mapping(odd)], [])
        lines += statement(ast.Expr(hold), indent)
    return lines


def _assigned(target: ast.expr, name: str, value: ast.expr | Tree) -> list[ast.stmt]:
    """Return how a child is set: a module as it is, a tensor as torch has it."""
    if isinstance(value, dict) or _is_module(value):
        return [ast.Assign([target], _holder(value), lineno=0)]
    tensor = _empty(value)
    if _is_buffer(value):
        call = ast.Call(dotted("self.register_buffer"), [ast.Constant(name), tensor], [])
        return [ast.Expr(call)]
    frozen = [ast.keyword("requires_grad", ast.Constant(False))] if _is_frozen(value) else []
    made = ast.Call(dotted("nn.Parameter"), [tensor], frozen)
    return [ast.Assign([target], made, lineno=0)]


def _is_module(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return not (isinstance(value.func, ast.Name) and value.func.id in ("buffer", "parameter"))


def _is_buffer(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "buffer"


def _is_frozen(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and any(k.arg == "requires_grad" for k in value.keywords)


def _empty(value: ast.expr) -> ast.expr:
    """Return `torch.empty(64, 64)` for a declared tensor."""
    match value:
        case ast.Call(args=sizes, keywords=keywords):
            kept = [k for k in keywords if k.arg == "dtype"]
        case ast.Tuple(elts=sizes):
            kept = []
        case _:
            sizes, kept = [ast.Starred(value)], []
    shape = sizes or [ast.Tuple([])]
    return ast.Call(dotted("torch.empty"), shape, kept)


def _holder(tree: ast.expr | Tree) -> ast.expr:
    if isinstance(tree, ast.expr):
        return tree
    return _module_list(tree) or ast.Call(ast.Name("Tensors"), *_arguments(tree))


def _module_list(tree: Tree) -> ast.expr | None:
    """Return `nn.ModuleList(...)` for modules that are numbered from 0."""
    if [child_key(name) for name in tree] != list(range(len(tree))):
        return None
    made = [_holder(value) for value in tree.values()]
    if not all(_is_module(value) for value in made):
        return None
    period = _period(made)
    if period is None:
        return ast.Call(dotted("nn.ModuleList"), [ast.List(made)], [])
    variable = "_" if period == 1 else "i"
    over = ast.Call(ast.Name("range"), [ast.Constant(len(made))], [])
    loop = ast.comprehension(ast.Name(variable), over, [], 0)
    alike = ast.GeneratorExp(_in_turn(made[:period], 0), [loop])
    return ast.Call(dotted("nn.ModuleList"), [bare(alike)], [])


def bare(generator: ast.GeneratorExp) -> ast.expr:
    """Return a generator as the only argument of a call, which needs no brackets of its own."""
    return ast.Name(ast.unparse(ast.fix_missing_locations(generator))[1:-1])


def _arguments(tree: Tree) -> tuple[list[ast.expr], list[ast.keyword]]:
    """Return keyword arguments for plain names, and a mapping for names like "0" and "class"."""
    plain = {name: value for name, value in tree.items() if is_attribute(name)}
    odd = {name: value for name, value in tree.items() if not is_attribute(name)}
    keywords = [ast.keyword(name, _holder(value)) for name, value in plain.items()]
    return ([_mapping(odd)] if odd else []), keywords


def _mapping(tree: Mapping[str, ast.expr | Tree]) -> ast.expr:
    """Return `{i: Block() for i in range(6, 12)}` when children are numbered on end and alike."""
    indices = [key for key in map(child_key, tree) if isinstance(key, int)]
    made = [_holder(value) for value in tree.values()]
    period = _period(made)
    if period is None or not indices or indices != list(range(indices[0], indices[0] + len(made))):
        keys: list[ast.expr | None] = [ast.Constant(child_key(name)) for name in tree]
        return ast.Dict(keys, made)
    bounds = [ast.Constant(indices[0])] if indices[0] else []
    over = ast.Call(ast.Name("range"), [*bounds, ast.Constant(indices[-1] + 1)], [])
    loop = ast.comprehension(ast.Name("i"), over, [], 0)
    return ast.DictComp(ast.Name("i"), _in_turn(made[:period], indices[0]), [loop])


def _period(made: Sequence[ast.expr]) -> int | None:
    """Return after how many children they repeat; None if they do not, or only once."""
    texts = [ast.unparse(ast.fix_missing_locations(value)) for value in made]
    for period in range(1, min(MAX_PERIOD, len(made) // 2) + 1):
        if all(text == texts[i % period] for i, text in enumerate(texts)):
            return period
    return None


def _in_turn(made: Sequence[ast.expr], start: int) -> ast.expr:
    """Return `Even() if i % 2 == 0 else Odd()` for children that take turns."""
    count = len(made)
    rest = made[(count - 1 - start) % count]
    for turn in range(count - 2, -1, -1):
        remainder = ast.BinOp(ast.Name("i"), ast.Mod(), ast.Constant(count))
        test = ast.Compare(remainder, [ast.Eq()], [ast.Constant(turn)])
        rest = ast.IfExp(test, made[(turn - start) % count], rest)
    return rest


def tie_lines(ties: Sequence[tuple[str, str]], indent: int) -> list[str]:
    """Return `self.head.weight = self.embed.weight` for each pair of names."""
    lines: list[str] = []
    for name, twin in ties:
        if all(is_attribute(part) for part in (*name.split("."), *twin.split("."))):
            node: ast.stmt = ast.Assign([dotted(f"self.{name}")], dotted(f"self.{twin}"), lineno=0)
        else:
            words: list[ast.expr] = [ast.Constant(name), ast.Constant(twin)]
            node = ast.Expr(ast.Call(dotted("self.tie"), words, []))
        lines += statement(node, indent)
    return lines


def ties(params: Sequence[Param]) -> list[tuple[str, str]]:
    """Return (name, first name) for each further name of a parameter."""
    first: dict[str, str] = {}
    found = [(param.name, first.setdefault(param.canonical, param.name), param) for param in params]
    return [(name, twin) for name, twin, p in found if twin != name and p.kind == "parameter"]
