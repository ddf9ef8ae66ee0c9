"""The tree of a module's children and tensors -> the lines of its `__init__`.

This module knows how children are named and numbered; how each is made is given to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from bigbrain_fx.core import Param
from bigbrain_fx.emit.modules.expressions import attribute, child_key, dotted
from bigbrain_fx.emit.modules.layout import statement
from bigbrain_fx.emit.modules.names import is_attribute

Tree: TypeAlias = dict[str, "ast.expr | Tree"]
"""A module's children by name: a module or declared tensor, or a plain holder of more."""
MAX_PERIOD = 4  # layers that take turns
MIN_RUN = 3  # fewer are written one by one


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
        return ast.Call(dotted("nn.ModuleList"), [ast.List(alike(made))], [])
    turns = _turns(made[:period], 0, len(made))
    return ast.Call(dotted("nn.ModuleList"), [bare(turns)], [])


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
        return _in_parts([child_key(name) for name in tree], made)
    return _by_number(made[:period], indices[0], len(made))


def _in_parts(keys: Sequence[int | str], made: Sequence[ast.expr]) -> ast.Dict:
    """Return `{1: Half(), **{i: Block() for i in range(2, 8)}}`: runs of like children are one."""
    parts: list[tuple[ast.expr | None, ast.expr]] = []
    for start, stop, period in _runs(made, keys):
        if period is None:
            parts.append((ast.Constant(keys[start]), made[start]))
        else:
            first = int(keys[start])
            parts.append((None, _by_number(made[start : start + period], first, stop - start)))
    return ast.Dict([key for key, _ in parts], [value for _, value in parts])


def _by_number(turn: Sequence[ast.expr], first: int, count: int) -> ast.DictComp:
    """Return `{i: Block() for i in range(6, 12)}`; `turn` is made again and again."""
    loop = ast.comprehension(ast.Name("i"), _range(first, count), [], 0)
    return ast.DictComp(ast.Name("i"), _in_turn(turn, first), [loop])


def alike(made: Sequence[ast.expr]) -> list[ast.expr]:
    """Return `*(Block(64) for _ in range(5))` in place of modules in a row that are the same."""
    found: list[ast.expr] = []
    for start, stop, period in _runs(made, range(len(made))):
        if period is None:
            found.append(made[start])
            continue
        turns = _turns(made[start : start + period], start, stop - start)
        found.append(ast.Starred(turns))
    return found


def _turns(turn: Sequence[ast.expr], first: int, count: int) -> ast.GeneratorExp:
    """Return `(Block() for _ in range(6))`; children that take turns ask for their number."""
    variable, first = ("_", 0) if len(turn) == 1 else ("i", first)
    loop = ast.comprehension(ast.Name(variable), _range(first, count), [], 0)
    return ast.GeneratorExp(_in_turn(turn, first), [loop])


def _range(first: int, count: int) -> ast.expr:
    bounds = [ast.Constant(first)] if first else []
    return ast.Call(ast.Name("range"), [*bounds, ast.Constant(first + count)], [])


def _runs(
    made: Sequence[ast.expr], keys: Sequence[int | str]
) -> Iterator[tuple[int, int, int | None]]:
    """Yield (start, stop, period) of children that repeat, and the others one by one."""
    texts = [ast.unparse(ast.fix_missing_locations(value)) for value in made]
    start = 0
    while start < len(texts):
        ends = {p: _run_end(texts, keys, start, p) for p in range(1, MAX_PERIOD + 1)}
        long = [p for p, end in ends.items() if end - start >= max(MIN_RUN, 2 * p)]
        period = max(long, key=lambda p: ends[p] - p, default=None)
        stop = start + 1 if period is None else ends[period]
        yield start, stop, period
        start = stop


def _run_end(texts: Sequence[str], keys: Sequence[int | str], start: int, period: int) -> int:
    """Return where children from `start` stop to be numbered on end and to take turns."""
    first, stop = keys[start], start
    while stop < len(texts) and isinstance(first, int) and keys[stop] == first + stop - start:
        if stop - start >= period and texts[stop] != texts[stop - period]:
            break
        stop += 1
    return stop


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
