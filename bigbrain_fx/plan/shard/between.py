"""Sequence axes -> what is left of them between the ops that other axes divide.

    norm ──▶ [columns ─ rows] ──▶ add ──▶ norm ──▶ [columns ─ rows] ──▶ add
    own positions   all positions     own positions    all positions    own positions

Norms, residual sums and dropout stand between the sums, whole on every member. Along the sequence
they are divided, too, and nothing more is sent: a reduce-scatter stands where a sum stood, and a
gather where its gradients were added. This file knows axes; it knows no prices and no members.

Source: Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bigbrain_fx.core import Axis, Graph, Op

SEQUENCE = "sequence"
_FLOATS = ("float", "bfloat")
_SMALL = 8  # parameters are at most so many times fewer numbers than what an op makes of them


def between(graph: Graph, every: Iterable[Axis], chosen: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return sequence axes cut down to the ops that no chosen axis touches.

    Args:
        graph: of all axes.
        every: its axes.
        chosen: those that are divided; they do not meet.

    Returns:
        Axes that meet neither the chosen ones nor each other, and begin at a sum of theirs, if
        there are any. Sums of such parts are theirs where they are much less, a mean loss, say. Of
        parameters they have those that only they read and that lie along them; the others of their
        ops are whole on every member, and their gradients are added.
    """
    taken = [*chosen]
    sums = {name for axis in taken for name in axis.summed}
    found: list[Axis] = []
    for axis in every:
        if axis.kind != SEQUENCE or axis in taken:
            continue
        left = _left(graph.at(graph.batch), axis, [*taken, *found])
        begins = any(sums & set(graph.op[name].refs) for name in left.along)
        if left.along and (begins or not taken):
            found.append(left)
    return tuple(found)


def _left(graph: Graph, axis: Axis, others: Iterable[Axis]) -> Axis:
    """Return what is left of one axis: its ops that are free, and the values that they touch."""
    busy, held = set[str](), set[str]()
    for other in others:
        busy |= {*other.along, *other.summed}
        held |= {place.name for place in (*other.values, *other.params)}
    lies = {place.name for place in axis.values} - held
    written = set(_written(graph))
    free = [graph.op[name] for name in axis.along if name not in busy and name in lies]
    own = _read_in_parts(graph, axis, free, held)
    ops = [op for op in free if _is_free(graph, op, held, written, own)]
    own &= {name for op in ops for name in op.params}
    made = {op.name for op in ops}
    sums = [
        op
        for op in (graph.op[name] for name in axis.summed if name not in busy)
        if _is_free(graph, op, held, written, own) and _is_worth_adding(graph, op, made)
    ]
    names = ({name for op in (*ops, *sums) for name in op.refs} | made) & lies
    return replace(
        axis,
        params=tuple(place for place in axis.params if place.name in own),
        values=tuple(place for place in axis.values if place.name in names),
        along=tuple(op.name for op in ops),
        summed=tuple(op.name for op in sums),
        whole=tuple(name for name in axis.whole if name not in busy),
        flops=sum(int(op.flops) for op in (*ops, *sums)),
        nbytes=sum(graph.param[name].spec.nbytes for name in own),
    )


def _read_in_parts(graph: Graph, axis: Axis, ops: Iterable[Op], held: set[str]) -> set[str]:
    """Return the parameters that lie along an axis, and of which such ops alone read anything."""
    own, names = {op.name for op in ops}, Counter(param.canonical for param in graph.params)
    single = {param.name for param in graph.params if names[param.canonical] == 1}
    read_elsewhere = {name for op in graph.ops if op.name not in own for name in op.params}
    return ({place.name for place in axis.params} & single) - held - read_elsewhere


def _is_free(graph: Graph, op: Op, held: set[str], written: set[str], own: set[str]) -> bool:
    """Whether an op makes one tensor of what no other axis divides, of few whole parameters."""
    touched = {op.name, *op.refs, *op.params}
    if op.is_tuple or op.target == "operator.getitem" or touched & (held | written):
        return False
    if not (op.requires_grad if graph.training else op.outputs[0].dtype.startswith(_FLOATS)):
        return False  # targets, positions, masks: little work, and others read them whole
    params = sum(graph.param[name].spec.numel for name in op.params if name not in own)
    return _SMALL * params <= math.prod(map(int, op.outputs[0].shape))


def _is_worth_adding(graph: Graph, op: Op, parts: set[str]) -> bool:
    """Whether an op reads nothing but such parts, and its sum is less than what it reads."""
    if op.params or not parts.issuperset(op.refs):
        return False
    read = max(math.prod(map(int, graph.op[name].outputs[0].shape)) for name in op.refs)
    return _SMALL * math.prod(map(int, op.outputs[0].shape)) <= read


def _written(graph: Graph) -> Iterator[str]:
    """Yield the values that are written in place, with all that shares their memory."""
    root: dict[str, str] = {}
    for op in graph.ops:
        root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name
    heads = {root.get(name, name) for op in graph.ops for name in op.mutates}
    yield from heads
    yield from (name for name, own in root.items() if own in heads)
