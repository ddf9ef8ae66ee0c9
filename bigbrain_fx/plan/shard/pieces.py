"""Axes that no choice of them divides -> their largest ops, each an axis of its own.

    residual ──conv──norm──up──▶ hidden ──down──▶ residual        up and down are divided: the axis
               └─ a piece: its filters are divided, and gathered    of the residual meets them there

A long axis runs through many layers, and meets what divides them better. What is left of it whole
is an op here and there; one that has weights of its own is divided by itself, its result gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from bigbrain_fx.core import Axis, Graph, Op, Place
from bigbrain_fx.plan.shard.choose import chosen_axes, is_dear, priced_axes
from bigbrain_fx.plan.shard.find import followed_axes, named
from bigbrain_fx.plan.shard.memory import is_sound

_AXES = "_axes"  # as a cached property is: a graph is frozen
_MEMBERS = 2  # what is whole where two divide a model is so for more


def axes(graph: Graph) -> tuple[Axis, ...]:
    """Return what of a graph can be split, the axes that divide most work first."""
    known: tuple[Axis, ...] | None = graph.__dict__.get(_AXES)
    if known is None:
        found = followed_axes(graph)
        every = named([*found, *_pieces(graph, found)])
        known = tuple(sorted(every, key=lambda axis: -axis.flops))
        graph.__dict__[_AXES] = known
    return known


def _pieces(graph: Graph, found: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes of single ops that the best choice of others leaves whole."""
    every = priced_axes(graph, found)
    chosen = chosen_axes(every, _MEMBERS)
    if not chosen:
        return ()
    ops = priced_axes(graph, _of_ops(graph.at(graph.batch), every, chosen))
    return tuple(axis for axis in _cheapest(ops) if not is_dear(axis, chosen))


def _of_ops(graph: Graph, every: Sequence[Axis], chosen: Sequence[Axis]) -> Iterator[Axis]:
    busy = {name for axis in chosen for name in (*axis.along, *axis.summed)}
    held = {place.name for axis in chosen for place in (*axis.params, *axis.values)}
    single = _read_once(graph)
    for axis in every:
        gathers = {name for name, _ in axis.gathered}
        params, values = _by_name(axis.params), _by_name(axis.values)
        for name in axis.along if axis.size >= _MEMBERS else ():
            op = graph.op[name]
            if name in busy or name in gathers or op.is_tuple or not single >= {*op.params}:
                continue
            own = _of(params, op.params), _of(values, (op.name, *op.refs))
            piece = _of_op(graph, axis, op, *own)
            lies = {place.name for place in (*piece.params, *piece.values)}
            if piece.params and name in lies and not lies & held and is_sound(graph, piece):
                yield piece


def _by_name(places: Iterable[Place]) -> Mapping[str, tuple[int, Place]]:
    """Return places with their numbers: a long axis lies in every layer, and each op asks."""
    return {place.name: (number, place) for number, place in enumerate(places)}


def _of(known: Mapping[str, tuple[int, Place]], names: Iterable[str]) -> tuple[Place, ...]:
    return tuple(place for _, place in sorted({known[n] for n in names if n in known}, key=_first))


def _first(numbered: tuple[int, Place]) -> int:
    return numbered[0]


def _of_op(
    graph: Graph, axis: Axis, op: Op, params: tuple[Place, ...], values: tuple[Place, ...]
) -> Axis:
    return replace(
        axis,
        name="",
        params=params,
        values=values,
        along=(op.name,),
        summed=(),
        whole=graph.consumers[op.name],
        flops=int(op.flops),
        nbytes=sum(graph.param[place.name].spec.nbytes for place in params),
        exchanges=(),
        gathered=(),
    )


def _read_once(graph: Graph) -> Set[str]:
    """Return the parameters that have one name, and that one op reads."""
    names = Counter(param.canonical for param in graph.params)
    readers = Counter(name for op in graph.ops for name in op.params)
    return {p.name for p in graph.params if names[p.canonical] == 1 == readers[p.name]}


def _cheapest(found: Iterable[Axis]) -> Iterator[Axis]:
    """Yield one axis for each op: that which sends least."""
    best: dict[str, Axis] = {}
    for axis in found:
        (name,) = axis.along
        other = best.get(name)
        if axis.flops and (other is None or _sent(axis) < _sent(other)):
            best[name] = axis
    yield from best.values()


def _sent(axis: Axis) -> int:
    return sum(exchange.nbytes for exchange in axis.exchanges)
