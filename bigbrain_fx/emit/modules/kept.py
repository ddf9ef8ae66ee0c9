"""Write what is kept of the user's own Python: assumptions, custom functions, leaves, a loss.

This module knows how such a call looks; `function` knows names and statements.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bigbrain_fx.core import OPAQUE_MODULE, OPAQUE_STEP, Arg, Graph, Op, ParamRef
from bigbrain_fx.emit.modules.expressions import attribute, dotted, function_place
from bigbrain_fx.emit.modules.names import Names
from bigbrain_fx.errors import InputError

ASSUME = {"assume.true": "assume", "assume.false": "assume_not"}
LIBRARY = "library."
LEAF = OPAQUE_MODULE
LINES_BASE = "ForwardLines"  # of the runtime: base class of lines of a forward
LOSS = "user.loss"
MODEL_NAME, LOSS_NAME = "user_model", "user_loss"
"""What `functions.py` calls the user's `model` and `loss`."""
SHARD = {
    "shard.copy_to_group": "copy_to_group",
    "shard.all_reduce": "all_reduce",
    "shard.all_gather": "all_gather",
    "shard.split": "own_part",
    "shard.reduce_scatter": "reduce_scatter",
    "shard.gather_to_group": "gather_to_group",
}
"""Exchange of a tensor group's ranks -> the runtime's function for it."""
ALL_SEEDED = "all_seeded"  # of the runtime: seeds Python's and NumPy's generators, too
RUNTIME = ("assume", "assume_not", "flat", "part_of", ALL_SEEDED, *SHARD.values())
"""Names that these calls need from the bundle's runtime."""

Argument = Callable[[Arg], ast.expr]
Users = Mapping[tuple[str, str], str]
"""(module, name) of the user's own -> what device files call it."""


def kept_call(op: Op, argument: Argument, users: Users) -> ast.expr | None:
    """Return the expression of a call of the user's own Python; None for an op of torch."""
    if op.target in ASSUME:
        return _assumption(op, argument)
    if op.target in SHARD:
        return _exchange(op, argument)
    if op.target.startswith(LEAF):
        return _leaf(op, argument, users)
    if op.target == LOSS:
        given = [_nest(arg, argument, users) for arg in _items(op.args[0])]
        return ast.Call(ast.Name(LOSS_NAME), given, [])
    if op.target.startswith(LIBRARY):
        return _library_call(op, argument)
    if op.target.startswith("opaque."):
        module, name = function_place(op.target)
        first, dot, rest = name.partition(".")
        function = dotted(f"{users[module, first]}{dot}{rest}")
        return ast.Call(attribute(function, "apply"), [argument(arg) for arg in op.args], [])
    return None


def _exchange(op: Op, argument: Argument) -> ast.expr:
    """Write `all_reduce(part, self.group)`; sums are what is meant where no word is given."""
    value, *rest = op.args
    words = [] if rest == ["sum"] else [argument(arg) for arg in rest]
    group = attribute(ast.Name("self"), "group")
    return ast.Call(ast.Name(SHARD[op.target]), [argument(value), group, *words], [])


def _library_call(op: Op, argument: Argument) -> ast.expr:
    """Write `torch.ops.library.op(...)`; the import of the function behind it registers it.

    Raises:
        InputError: the target is not made of Python names.
    """
    parts = op.target.split(".")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise InputError(
            f"op {op.name!r} has the target {op.target!r}: expected Python names", code="BX3614"
        )
    named = [ast.keyword(name, argument(value)) for name, value in op.kwargs]
    function = dotted(f"torch.ops.{parts[1]}.{parts[2]}")
    return ast.Call(function, [argument(arg) for arg in op.args], named)


def seeded(op: Op, given: Sequence[ast.expr]) -> ast.expr:
    """Return what seeds the draws of an op: the user's own Python may draw with any generator."""
    own = ast.Name("self")
    if op.target == LOSS or op.target.startswith((LEAF, "opaque.")):
        return ast.Call(ast.Name(ALL_SEEDED), [own, *given], [])
    return ast.Call(attribute(own, "seeded"), [*given], [])


def leaf_path(op: Op) -> str | None:
    """Return the path of the module that an op calls whole; None for any other op."""
    return op.target.removeprefix(LEAF) if op.target.startswith(LEAF) else None


def leaf_module(path: str) -> ast.expr:
    """Return the expression that makes a stage's copy of a leaf."""
    return ast.Call(ast.Name("part_of"), [ast.Name(MODEL_NAME), ast.Constant(path)], [])


def leaf_modules(op: Op, relative: Callable[[str], str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield path and expression of what a stage makes for an op that calls a leaf.

    Lines of a forward are made of the modules that they call, which are before them.

    Args:
        op: any.
        relative: path in the model -> in the module that is made.
    """
    path, node = leaf_path(op), lines_class(op)
    if path and node is None:
        yield path, leaf_module(path)
    elif path and node is not None:
        yield from ((used, leaf_module(used)) for used in lines_uses(op, node))
        owner = relative(path).rpartition(".")[0]
        given = [ast.Name("self"), ast.Constant(owner), ast.Name(MODEL_NAME)]
        yield path, ast.Call(ast.Name(node.name), given, [])


def lines_class(op: Op) -> ast.ClassDef | None:
    """Return the class of the lines of a forward that an op calls; None for any other op."""
    if not op.target.startswith(LEAF) or LINES_BASE not in op.code:
        return None
    node = ast.parse(op.code).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def lines_uses(op: Op, node: ast.ClassDef) -> list[str]:
    """Return the paths of the modules that such lines call, of those that have tensors."""
    found = _attributes(node)
    names = [arg.param for arg in op.args[1:] if isinstance(arg, ParamRef)]
    paths = [f"{found['owner']}.{name}".removeprefix(".") for name in found["uses"]]
    return [path for path in paths if any(name.startswith(f"{path}.") for name in names)]


def opaque_modules(graph: Graph) -> tuple[str, ...]:
    """Return the paths of the modules of the user's model that stages make anew.

    Of lines of a forward it is the module whose forward it is.
    """
    found = dict[str, None]()
    for op in _all(graph, [op.name for op in graph.ops]):
        path, node = leaf_path(op), lines_class(op)
        if path is not None:
            found[_attributes(node)["owner"] if node else path] = None
    return tuple(found)


def _attributes(node: ast.ClassDef) -> dict[str, Any]:
    """Return what a class of lines says of itself: owner, uses, keeps."""
    return {
        target.id: ast.literal_eval(each.value)
        for each in node.body
        if isinstance(each, ast.Assign) and isinstance(target := each.targets[0], ast.Name)
    }


def user_names(graph: Graph, ops: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the user's own that these ops need; "" is the model file itself."""
    for op in _all(graph, ops):
        if op.target.startswith("opaque."):
            module, name = function_place(op.target)
            yield module, name.partition(".")[0]
        elif op.target.startswith(LIBRARY):
            *place, name = op.target.split(".")[4:]
            yield ".".join(place), name
        elif op.target.startswith(LEAF):
            node = lines_class(op)
            yield from [("", node.name)] if node else []
            yield "", MODEL_NAME
        elif op.target == LOSS:
            yield "", LOSS_NAME
        elif op.target == OPAQUE_STEP:
            yield from (("", name) for name in step_names(op))
        for kind in _classes(op):
            module, _, name = kind.rpartition(".")
            yield module, name


def step_names(op: Op) -> tuple[str, ...]:
    """Return what an opaque step calls of the model file."""
    return (MODEL_NAME, LOSS_NAME) if op.args[1] else (MODEL_NAME,)


def user_aliases(graph: Graph, taken: Names) -> dict[tuple[str, str], str]:
    """Return what device files call the user's own: its name, unless that is another's.

    Args:
        graph: of the model.
        taken: names that device files have already; takes these, too.
    """
    found: dict[tuple[str, str], str] = {}
    for module, name in user_names(graph, [op.name for op in graph.ops]):
        if (module, name) not in found:
            longer = f"{module.rpartition('.')[2] or 'user'}_{name}"
            found[module, name] = taken.fresh(longer if name in taken.taken else name)
    return found


def _all(graph: Graph, ops: Iterable[str]) -> Iterator[Op]:
    pending = [graph.op[name] for name in ops]
    while pending:
        op = pending.pop(0)
        yield op
        pending[:0] = op.body.ops if op.body else ()


def _classes(op: Op) -> Iterator[str]:
    """Yield the classes of the objects that a call is given, "module.Class"."""
    if not op.target.startswith(LEAF) and op.target != LOSS:
        return
    pending = list(op.args)
    while pending:
        arg = pending.pop(0)
        if isinstance(arg, tuple):
            if len(arg) == 3 and arg[0] == "object":
                yield str(arg[1])
            pending[:0] = arg


def _assumption(op: Op, argument: Argument) -> ast.expr:
    place = ast.Constant(op.source or "forward")
    return ast.Call(ast.Name(ASSUME[op.target]), [argument(op.args[0]), place], [])


def _leaf(op: Op, argument: Argument, users: Users) -> ast.expr:
    """Write `self.blocks[0].experts(x)`; several tensors are taken out of what it gives.

    With attributes that it leaves for others: `flat((self.moe(x), self.moe.aux))`.
    """
    positional, named, *names = _items(op.args[0])
    given = [_nest(arg, argument, users) for arg in _items(positional)]
    pairs = map(_pair, _items(named))
    keywords = [ast.keyword(str(k), _nest(v, argument, users)) for k, v in pairs]
    path, left = op.target.removeprefix(LEAF), _items(names[0]) if names else ()
    call: ast.expr = ast.Call(argument(ParamRef(path)), given, keywords)
    if left:
        own = [argument(ParamRef(f"{path}.{name}")) for name in map(str, left)]
        call = ast.Tuple([call, *own])
    return ast.Call(ast.Name("flat"), [call], []) if op.is_tuple else call


def _items(nest: Arg) -> tuple[Arg, ...]:
    """Return what a container holds: its tag stands first, its items last."""
    assert isinstance(nest, tuple)
    items = nest[-1]
    assert isinstance(items, tuple)
    return items


def _pair(item: Arg) -> tuple[Arg, Arg]:
    """Return the key and the value of an entry."""
    assert isinstance(item, tuple)
    key, value = item
    return key, value


def _nest(arg: Arg, argument: Argument, users: Users) -> ast.expr:
    """Write a container as Python does: `{"labels": labels}`, `Output(logits=logits)`."""
    match arg:
        case ("dict", _):
            pairs = [_pair(item) for item in _items(arg)]
            keys: list[ast.expr | None] = [argument(key) for key, _ in pairs]
            return ast.Dict(keys, [_nest(value, argument, users) for _, value in pairs])
        case ("tuple", _):
            return ast.Tuple([_nest(item, argument, users) for item in _items(arg)])
        case ("list", _):
            return ast.List([_nest(item, argument, users) for item in _items(arg)])
        case ("object", str(kind), _):
            pairs = [_pair(item) for item in _items(arg)]
            fields = [ast.keyword(str(key), _nest(value, argument, users)) for key, value in pairs]
            module, _, name = kind.rpartition(".")
            return ast.Call(ast.Name(users[module, name]), [], fields)
    return argument(arg)
