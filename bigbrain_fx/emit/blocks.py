"""Find the blocks that repeat: one class for all layers that do the same, as their author wrote it.

    stage ops ──by module call──▶ candidates ──equal signature──▶ Template, used by some Instances

Two module calls are the same block when they run the same calls on the same wiring. Where only
numbers differ (channels, strides), the numbers become arguments of the class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Arg, Const, Dim, Graph, ModuleCall, Op, ParamRef, Ref
from bigbrain_fx.emit.scope import Scope, make_scope
from bigbrain_fx.units import is_size

MIN_OPS = 3  # a class for less would be longer than what it replaces
Where: TypeAlias = tuple[str | int, ...]
"""The place of a number: (op's index, argument path ...) or ("param", name)."""
Number: TypeAlias = int | float | tuple[Dim, ...]
"""What may vary between uses of a class: a literal, or the shape of a parameter."""
Signature: TypeAlias = tuple[object, ...]
"""What the uses of one class have in common: nested tuples, only ever compared."""


@dataclass(frozen=True)
class Instance:
    """One module call in one stage that may become a call of a class."""

    stage: int
    module: str
    scope: Scope
    names: frozenset[str]


@dataclass(frozen=True)
class Template:
    """One class of the bundle: the instance it is written from, and the numbers that vary.

    `varying` groups the places that hold equal numbers in every use: they share an argument.
    """

    module: str
    model: Instance
    varying: tuple[tuple[Where, ...], ...]


@dataclass(frozen=True)
class Blocks:
    """All templates of a bundle, in order of first use.

    `instances` and their template's key are found by (stage, path, call).
    """

    templates: Mapping[Signature, Template]
    instances: Mapping[tuple[int, str, int], Instance]
    key_of: Mapping[tuple[int, str, int], Signature]


def find_blocks(
    graph: Graph,
    stages: Sequence[tuple[Op, ...]],
    gives: Sequence[frozenset[str]],
    keys: Mapping[str, tuple[str, int]],
) -> Blocks:
    """Find the blocks that occur at least twice among all stages.

    Args:
        graph: as captured.
        stages: each stage's ops.
        gives: each stage's values that other stages or the caller use.
        keys: random op -> (module path, how many draws of that module came before).
    """
    found: dict[Signature, list[Instance]] = defaultdict(list)
    for number, ops in enumerate(stages):
        for instance in _candidates(graph, number, ops, gives[number]):
            if _keys_agree(instance.scope, keys):
                found[signature(graph, instance.scope)].append(instance)
    repeated = {key: same for key, same in found.items() if len(same) > 1}
    templates = {
        key: Template(same[0].module, same[0], _varying(graph, same))
        for key, same in repeated.items()
    }
    instances = {_place(i): i for same in repeated.values() for i in same}
    key_of = {_place(i): key for key, same in repeated.items() for i in same}
    return Blocks(templates, instances, key_of)


def _place(instance: Instance) -> tuple[int, str, int]:
    return instance.stage, instance.scope.path, instance.scope.call


def numbers(graph: Graph, scope: Scope) -> dict[Where, Number]:
    """Return every number in a scope by its place: literals of calls, shapes of parameters."""
    found: dict[Where, Number] = {}
    for i, op in enumerate(scope.ops):
        for path, value in _literals((op.args, tuple(v for _, v in op.kwargs))):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[i, *path] = value
    for name in scope.params:
        found["param", scope.relative(name)] = graph.param[name].spec.shape
    return found


def signature(graph: Graph, scope: Scope) -> Signature:
    """Return what two scopes must have in common to share a class: all but numbers."""
    index = {op.name: i for i, op in enumerate(scope.ops)}
    outside = {name: i for i, name in enumerate(scope.takes)}
    outer = {name: i for i, name in enumerate(scope.outer_params)}

    def skeleton(arg: Arg) -> object:
        match arg:
            case Ref(value=value) if value in index:
                return "local", index[value]
            case Ref(value=value):
                return "outside", outside.get(value, value)
            case ParamRef(param=name):
                return _param_key(graph, scope, name, outer)
            case Const(const=const):
                return "const", const
            case tuple():
                return tuple(skeleton(item) for item in arg)
            case bool() | str() | None:
                return "literal", arg
        return ("number",)

    calls = tuple(_call_key(op, skeleton) for op in scope.ops)
    return (
        calls,
        len(scope.takes),
        len(scope.outer_params),
        tuple(index[name] for name in scope.gives),
    )


def _call_key(op: Op, skeleton: Callable[[Arg], object]) -> object:
    body = [(o.name, _call_key(o, skeleton)) for o in op.body.ops] if op.body else []
    inner = (*body, op.body.outputs) if op.body else None
    kwargs = tuple((name, skeleton(value)) for name, value in op.kwargs)
    return op.target, tuple(skeleton(arg) for arg in op.args), kwargs, op.random, inner


def _param_key(graph: Graph, scope: Scope, name: str, outer: Mapping[str, int]) -> object:
    spec = graph.param[name].spec
    kind = graph.param[name].kind, spec.dtype, spec.requires_grad, len(spec.shape)
    return ("outer", outer[name], kind) if name in outer else ("param", scope.relative(name), kind)


def _candidates(
    graph: Graph, stage: int, ops: Sequence[Op], gives: frozenset[str], depth: int = 0
) -> Iterator[Instance]:
    used_by: dict[str, set[str]] = defaultdict(set)
    for op in ops:
        for ref in op.refs:
            used_by[ref].add(op.name)
    yield from _at_depth(graph, stage, ops, gives, used_by, depth)


def _at_depth(
    graph: Graph,
    stage: int,
    ops: Sequence[Op],
    gives: frozenset[str],
    used_by: Mapping[str, set[str]],
    depth: int,
) -> Iterator[Instance]:
    for module, run in runs(ops, depth):
        if module is None:
            continue
        names = frozenset(op.name for op in run)
        leaves = [name for name in names if name in gives or used_by[name] - names]
        body = [op for op in run if not is_size(op)]
        if len(body) >= MIN_OPS and module.path:
            scope = make_scope(graph, body, set(leaves), path=module.path, call=module.call)
            if scope.gives and scope.params:
                yield Instance(stage, module.type, scope, names)
        yield from _at_depth(graph, stage, run, gives, used_by, depth + 1)


def runs(ops: Sequence[Op], depth: int) -> Iterator[tuple[ModuleCall | None, list[Op]]]:
    """Split ops into runs of one module call at a depth of the module stack; None for ops above it.

    A call whose ops are not together (something else runs in between) is given as runs of None.
    """
    pieces: list[tuple[ModuleCall | None, list[Op]]] = []
    for op in ops:
        module = op.modules[depth] if len(op.modules) > depth else None
        if is_size(op) and pieces:
            module = pieces[-1][0]  # a size belongs to whatever is around it
        if pieces and pieces[-1][0] == module:
            pieces[-1][1].append(op)
        else:
            pieces.append((module, [op]))
    seen = Counter(module for module, _ in pieces)
    for module, run in pieces:
        yield (module if seen[module] == 1 else None), run


def _keys_agree(scope: Scope, keys: Mapping[str, tuple[str, int]]) -> bool:
    """Whether the draws of a block can be numbered by its call alone."""
    return all(
        keys[op.name][1] == scope.call * count + index for index, count, op in draws(scope, keys)
    )


def draws(scope: Scope, keys: Mapping[str, tuple[str, int]]) -> Iterator[tuple[int, int, Op]]:
    """Yield each random op with its number among the draws of its module here, and their count."""
    by_path: dict[str, list[Op]] = defaultdict(list)
    for op in scope.ops:
        if op.name in keys:
            by_path[keys[op.name][0]].append(op)
    for same in by_path.values():
        for index, op in enumerate(same):
            yield index, len(same), op


def _varying(graph: Graph, same: Sequence[Instance]) -> tuple[tuple[Where, ...], ...]:
    tables = [numbers(graph, instance.scope) for instance in same]
    columns: dict[tuple[str, ...], list[Where]] = defaultdict(list)
    for where in tables[0]:
        column = tuple(repr(table[where]) for table in tables)
        if len(set(column)) > 1:
            columns[column].append(where)
    return tuple(tuple(places) for places in columns.values())


def _literals(arg: Arg, path: Where = ()) -> Iterator[tuple[Where, Arg]]:
    if isinstance(arg, tuple):
        for i, item in enumerate(arg):
            yield from _literals(item, (*path, i))
    else:
        yield path, arg
