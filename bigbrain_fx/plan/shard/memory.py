"""Axes that respect values written in place, and ops that see how values lie in memory.

An op that stays whole gets a copy of its whole inputs: its writes into the copy are lost. Where
memory is written, each op on it therefore works on the ranks' own parts, or it is not divided. A
copy lies row by row, and results of the copy may lie that way, too. Most ops do not see the layout.
Ops that draw numbers do, strides over memory do, and so does code that no trace looks into.
"""

from __future__ import annotations

from collections.abc import Collection, Set as AbstractSet

from bigbrain_fx.core import Axis, Graph, Op, TensorSpec

_KEPT = ("leaf.", "forward.")  # modules and lines that no trace holds: they have their own tensors
_UNTRACED = (*_KEPT, "opaque.", "library.")
_STRIDES = "aten.as_strided"
_MEMORY = "_memory"  # as a cached property is: a graph is frozen


def sees_memory(op: Op) -> bool:
    """Whether what an op computes may depend on how its inputs lie in memory."""
    if op.body is not None:
        return any(map(sees_memory, op.body.ops))
    return op.random or op.target.startswith(_UNTRACED) or strides_over(op)


def strides_over(op: Op) -> bool:
    """Whether an op, or one in its body, reads memory by its strides."""
    if op.body is not None:
        return any(map(strides_over, op.body.ops))
    return op.target.startswith(_STRIDES)


def owns_all(graph: Graph, name: str) -> bool:
    """Whether a value is all that its memory holds, in some order of its dimensions."""
    spec, root = _spec(graph, name), name
    while root in graph.op and (view_of := graph.op[root].view_of):
        root = view_of
    owner = _spec(graph, root)
    if spec is None or owner is None:
        return False
    steps = zip(spec.shape, spec.strides, strict=True) if spec.strides else ()
    reached = 1 + sum((int(n) - 1) * int(stride) for n, stride in steps)
    return spec.numel == owner.numel and reached in (1, spec.numel)


def _spec(graph: Graph, name: str) -> TensorSpec | None:
    if name in graph.param:
        return graph.param[name].spec
    if name in graph.input:
        return graph.input[name].spec.at(graph.batch)
    op = graph.op[name]
    return op.outputs[0].at(graph.batch) if op.outputs and not op.is_tuple else None


def is_sound(graph: Graph, axis: Axis) -> bool:
    """Whether ranks that have parts of an axis compute, and write, what one process does."""
    lies = {place.name for place in (*axis.values, *axis.params)}
    active = {*axis.along, *axis.summed}
    return works_on_parts(graph, lies, {*active, *axis.whole}, active)


def works_on_parts(
    graph: Graph, lies: AbstractSet[str], touched: Collection[str], active: AbstractSet[str]
) -> bool:
    """Whether all ops on memory that is written in place compute each part from the same part.

    Args:
        graph: of the axis.
        lies: values and parameters that have it, under all of their names.
        touched: ops that read or make such values.
        active: those of them that work on parts.
    """
    written, kept = _memory(graph)
    if kept & lies:
        return False
    memory = written & lies
    if not memory:
        return True
    if not memory.isdisjoint(graph.input):
        return False  # each op is given a part of its own, and what one writes the next lacks
    touching = {n for n in touched if memory & {n, *graph.op[n].refs}}
    touching |= {op.name for op in graph.ops if not memory.isdisjoint(op.params)}
    return touching <= active


def is_written(graph: Graph, name: str) -> bool:
    """Whether a value, or what it is a view of, is written in place."""
    return name in _memory(graph)[0]


def _memory(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """Name what is written in place, with its views; and parameters of opaque modules."""
    known: tuple[frozenset[str], frozenset[str]] | None = graph.__dict__.get(_MEMORY)
    if known is None:
        known = graph.__dict__[_MEMORY] = _written(graph), _kept(graph)
    return known


def _written(graph: Graph) -> frozenset[str]:
    root = {param.name: param.canonical for param in graph.params}
    for op in graph.ops:
        root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name
    heads = {root.get(name, name) for op in graph.ops for name in op.mutates}
    return frozenset(name for name, own in root.items() if own in heads)


def _kept(graph: Graph) -> frozenset[str]:
    names = {n for op in graph.ops if op.target.startswith(_KEPT) for n in op.params}
    canonical = {graph.param[name].canonical for name in names if name in graph.param}
    return frozenset(param.name for param in graph.params if param.canonical in canonical)
