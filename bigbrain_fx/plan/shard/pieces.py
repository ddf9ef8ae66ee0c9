"""Axes that cannot be divided together -> their largest ops, each an axis of its own.

    residual ──conv──norm──up──▶ hidden ──down──▶ residual        up and down are divided: the axis
               └─ a piece: its filters are divided, and gathered    of the residual meets them there

A long axis runs through many layers, and meets axes that divide them better. A few of its ops are
left whole; one that has weights of its own is divided by itself, its result gathered.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from bigbrain_fx.core import Axis, Exchange, Graph, Op, Place
from bigbrain_fx.plan.shard.find import followed_axes, named
from bigbrain_fx.plan.shard.memory import is_sound, is_written
from bigbrain_fx.plan.shard.rewrite import exchanges

# ------------------------------------------------------------------------------------------------
# Axes -> those that are split together: the cheapest for the work they divide, none in the way.


_PRICED = "_priced"  # as a cached property is: a graph is frozen
_DEAR = 10
"""Times what is sent for divided work on average: more may not be sent for more of it."""


def priced_axes(graph: Graph, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Note for each axis what splitting it alone would send.

    Pieces, names and trials ask for the same axes, hundreds of a large model, each once more.
    """
    known: dict[Axis, tuple[Exchange, ...]] = graph.__dict__.setdefault(_PRICED, {})
    found = []
    for axis in axes:
        key = replace(axis, name="", exchanges=())
        if key not in known:
            known[key] = exchanges(graph, [axis])
        found.append(replace(axis, exchanges=known[key]))
    return tuple(found)


def of_layers(axis: Axis) -> str:
    """Return the name that axes of identical layers share: `blocks.*:hidden`."""
    return re.sub(r"\d+", "*", axis.name)


def chosen_axes(axes: Iterable[Axis], members: int, kinds: Sequence[str] = ()) -> tuple[Axis, ...]:
    """Choose axes that do not meet, those first that send least for the work they divide.

    One that divides more than all that it meets takes their place, unless that is dear.

    Args:
        axes: priced_axes.
        members: of the group; an axis has at least as many parts.
        kinds: to choose from; all when none is named.
    """
    fit = (axis for axis in axes if axis.size >= members and axis.flops and axis.params)
    wanted = [_Candidate(axis) for axis in fit if not kinds or axis.kind in kinds]
    wanted.sort(key=_Candidate.price)
    taken, other = _added([], wanted), None
    while (other := _dividing_more(taken, wanted)) is not None:
        taken = other
    return tuple(each.axis for each in sorted(taken, key=_Candidate.price))


def table_axes(axes: Iterable[Axis], chosen: Sequence[Axis], members: int) -> tuple[Axis, ...]:
    """Return the axes that divide parameters and no work, as embeddings', where chosen ones end."""
    busy, found = set[str]().union(*map(_names, chosen)), []
    for axis in (axis for axis in axes if axis.params and not axis.flops):
        if axis.size >= members and busy.isdisjoint(_names(axis)):
            found.append(axis)
            busy |= _names(axis)
    return tuple(found)


def _names(axis: Axis) -> set[str]:
    return {place.name for place in (*axis.params, *axis.values)}


class _Candidate:
    """An axis, with what it divides, sends and lies in."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.flops = axis, axis.flops
        self.sent = axis.sent_bytes(backward=False) + axis.sent_bytes(backward=True)
        self.names = _names(axis)

    def price(self) -> float:
        """Return the bytes that are sent for a unit of divided work."""
        return self.sent / self.flops


def _added(taken: Sequence[_Candidate], wanted: Iterable[_Candidate]) -> list[_Candidate]:
    """Add those that meet none so far, one by one."""
    found = [*taken]
    busy = {name for each in taken for name in each.names}
    for each in wanted:
        if each.names.isdisjoint(busy):
            found.append(each)
            busy |= each.names
    return found


def _dividing_more(
    taken: Sequence[_Candidate], wanted: Sequence[_Candidate]
) -> list[_Candidate] | None:
    """Return a choice that divides more: with one axis in the place of all that it meets."""
    own = {name: each for each in taken for name in each.names}
    for one in sorted(wanted, key=lambda each: -each.flops):
        met = {own[name] for name in one.names & own.keys()}
        if one in met or one.flops <= sum(each.flops for each in met):
            continue
        other = _added([one, *(each for each in taken if each not in met)], wanted)
        if _is_worth_it(taken, other):
            return other
    return None


def _is_worth_it(taken: Sequence[_Candidate], other: Sequence[_Candidate]) -> bool:
    work, more = (sum(each.flops for each in own) for own in (taken, other))
    sent, most = (sum(each.sent for each in own) for own in (taken, other))
    return more > work and (most - sent) * work <= _DEAR * sent * (more - work)


def is_dear(axis: Axis, chosen: Iterable[Axis]) -> bool:
    """Whether too much is sent for what an axis divides, beside what others send for theirs."""
    taken = [_Candidate(each) for each in chosen]
    return not _is_worth_it(taken, [*taken, _Candidate(axis)])


# ------------------------------------------------------------------------------------------------
# Axes that no choice of them divides -> their largest ops, each an axis of its own.


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


# ------------------------------------------------------------------------------------------------
# Sequence axes -> what is left of them between the ops that other axes divide.
#
#     norm ──▶ [columns ─ rows] ──▶ add ──▶ norm ──▶ [columns ─ rows] ──▶ add
#     own positions   all positions     own positions    all positions    own positions
#
# Norms, residual sums and dropout stand between the sums, whole on every rank. Along the sequence
# they are divided, too, and nothing more is sent: a reduce-scatter stands where a sum stood, and a
# gather where its gradients were added. This file knows axes; it knows no prices and no ranks.
#
# Source: Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer
# Models", section 4.2.2.


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
        parameters they have those that only they read and that lie along them. Other parameters
        are whole on every rank, and their gradients are added.
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
    free = [graph.op[name] for name in axis.along if name not in busy and name in lies]
    own = _read_in_parts(graph, axis, free, held)
    ops = [op for op in free if _is_free(graph, op, held, own)]
    own &= {name for op in ops for name in op.params}
    made = {op.name for op in ops}
    sums = [
        op
        for op in (graph.op[name] for name in axis.summed if name not in busy)
        if _is_free(graph, op, held, own) and _is_worth_adding(graph, op, made)
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


def _is_free(graph: Graph, op: Op, held: set[str], own: set[str]) -> bool:
    """Whether an op makes one tensor of what no other axis divides, of few whole parameters."""
    touched = {op.name, *op.refs, *op.params}
    if op.is_tuple or op.target == "operator.getitem" or touched & held:
        return False
    if any(is_written(graph, name) for name in touched):
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
