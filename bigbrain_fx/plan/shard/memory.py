"""Which axes leave alone what is written in place, and what modules that are kept whole own.

An op that is kept whole is given the whole of what it reads, a copy: what it writes there is lost.
So where memory is written, each op on it works on the members' own parts, or it is not divided.
"""

from __future__ import annotations

from collections.abc import Collection, Set as AbstractSet

from bigbrain_fx.core import Axis, Graph

_KEPT = ("leaf.", "forward.")  # modules and lines that no trace holds: they have their own tensors
_MEMORY = "_memory"  # as a cached property is: a graph is frozen


def is_sound(graph: Graph, axis: Axis) -> bool:
    """Whether members that have parts of an axis compute, and write, what one process does."""
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
    touching = {n for n in touched if written & {n, *graph.op[n].refs}}
    touching |= {op.name for op in graph.ops if not memory.isdisjoint(op.params)}
    return touching <= active


def _memory(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """Name what is written in place, with its views; and parameters of what is kept whole."""
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
