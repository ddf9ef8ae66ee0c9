"""Axes -> trials: each op that a rewriting would split, as a graph of its own, whole and in shares.

Rules are checked like everything else: the caller of the trials reports failures, and
`sound_axes` puts those ops back to whole. One trial stands for all identical ops.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from bigbrain_fx.core import (
    Arg,
    Axis,
    Graph,
    Input,
    Op,
    ParamRef,
    Ref,
    RuleTrial,
    Sharded,
    TensorSpec,
    memory_order,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.shard.memory import is_sound
from bigbrain_fx.plan.shard.pieces import priced_axes
from bigbrain_fx.plan.shard.rewrite import Shares, sharded
from bigbrain_fx.plan.shard.saved import with_args

_ROWS = 3  # of the batch in a trial


def trials(graph: Graph, axes: Iterable[Axis], shares: Shares) -> tuple[RuleTrial, ...]:
    """Return one trial for each kind of op and axis that `sharded` would use, in graph order."""
    alike: dict[str, list[tuple[Axis, str]]] = {}
    for axis in axes:
        for name in (*axis.along, *axis.summed):
            if graph.op[name].target != "operator.getitem":  # tried with the tuple it is of
                alike.setdefault(_signature(graph, axis, name), []).append((axis, name))
    return tuple(_trial(graph, same, shares) for same in alike.values())


def sound_axes(
    graph: Graph, axes: Iterable[Axis], failed: Iterable[tuple[RuleTrial, str]]
) -> tuple[tuple[Axis, ...], Mapping[tuple[str, str], str]]:
    """Leave the ops whole whose trials failed.

    Returns:
        The axes, priced_axes anew, and the reason for each (axis, op).
    """
    reasons = {pair: why for trial, why in failed for pair in trial.ops}
    return priced_axes(graph, without(graph, axes, reasons.keys())), reasons


def without(
    graph: Graph, axes: Iterable[Axis], whole: Collection[tuple[str, str]]
) -> tuple[Axis, ...]:
    """Return axes that leave some ops whole: pairs of axis and op.

    An axis of what such an op writes in place is not divided at all.
    """
    if not whole:
        return tuple(axes)
    left = (_without(axis, whole) for axis in axes)
    return tuple(axis for axis in left if is_sound(graph, axis))


def _without(axis: Axis, bad: Container[tuple[str, str]]) -> Axis:
    def good(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if (axis.name, name) not in bad)

    out = tuple(name for name in (*axis.along, *axis.summed) if (axis.name, name) in bad)
    return replace(
        axis, along=good(axis.along), summed=good(axis.summed), whole=(*axis.whole, *out)
    )


def _trial(graph: Graph, alike: Sequence[tuple[Axis, str]], shares: Shares) -> RuleTrial:
    axis, name = alike[0]
    alone = _alone(graph, graph.op[name])
    within = _within(axis, alone)
    ops = tuple((own.name, op) for own, op in alike)
    return RuleTrial(ops, alone, _divided(alone, within, shares), _reduced(alone, within, shares))


def _reduced(alone: Graph, axis: Axis, shares: Shares) -> tuple[Graph, Sharded] | None:
    """Return a trial's graphs at smaller sizes; None where it is small, or has no smaller ones."""
    small = with_small_sizes(alone, axis)
    if small is None:
        return None
    with suppress(InputError):  # an axis of positions is too short then, say
        return small, _divided(small, axis, shares)
    return None


def _divided(alone: Graph, axis: Axis, shares: Shares) -> Sharded:
    found = sharded(alone, [axis], shares)
    return replace(found, members=tuple(map(_writable, found.members)))


def _writable(member: Graph) -> Graph:
    """Copy what an exchange gives an op that writes into it.

    In the model that value was made by an op, and each rank has its own part of it; autograd
    refuses writes into what an exchange of all ranks gives.
    """
    given_to = {name for op in member.ops if op.mutates for name in op.refs}
    ops: list[Op] = []
    for op in member.ops:
        if op.target.startswith("shard.") and op.name in given_to:
            given = replace(op, name=f"{op.name}_given")
            copy = replace(op, target="aten.clone.default", args=(Ref(given.name),), saves=None)
            ops += [given, copy]
        else:
            ops.append(op)
    return replace(member, ops=tuple(ops))


def _signature(graph: Graph, axis: Axis, name: str) -> str:
    """Say all that a trial of an op depends on: its arguments, their sizes, where the axis lies."""
    op = graph.op[name]
    places = {p.name: (p.dim, p.inner) for p in (*axis.values, *axis.params)}

    def said(arg: Arg) -> object:
        if isinstance(arg, tuple):
            return tuple(map(said, arg))
        if isinstance(arg, ParamRef):
            return graph.param[arg.param].spec, graph.param[arg.param].kind, places.get(arg.param)
        if isinstance(arg, Ref):
            return _specs(graph, arg.value), places.get(arg.value)
        return arg

    args = said((*op.args, *(value for _, value in op.kwargs)))
    keys = tuple(key for key, _ in op.kwargs)
    role = name in axis.summed, any(op == name for op, _ in axis.gathered)
    return repr((op.target, args, keys, op.outputs, places.get(name), axis.size, role))


def _specs(graph: Graph, name: str) -> object:
    return graph.input[name].spec if name in graph.input else graph.op[name].outputs


def _within(axis: Axis, small: Graph) -> Axis:
    """Return what of an axis lies in a part of the graph."""
    names = {*small.op, *small.input, *small.param}

    def inside(ops: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in ops if name in small.op)

    return replace(
        axis,
        params=tuple(place for place in axis.params if place.name in names),
        values=tuple(place for place in axis.values if place.name in names),
        along=inside(axis.along),
        summed=inside(axis.summed),
        whole=inside(axis.whole),
        gathered=tuple(pair for pair in axis.gathered if pair[0] in small.op),
    )


def _alone(graph: Graph, op: Op) -> Graph:
    """Return a graph of one op, with the sizes it reads and the items of what it makes."""
    sizes = _sizes(graph, op)
    items = [graph.op[name] for name in graph.consumers[op.name]] if op.is_tuple else []
    ops = [replace(each, modules=(), lines=(), saves=None) for each in (*sizes, op, *items)]
    made = {each.name for each in ops}
    read = dict.fromkeys(name for each in ops for name in each.refs if name not in made)
    return Graph(
        name="trial",
        ops=tuple(ops),
        inputs=tuple(_input(graph, name) for name in read),
        params=tuple(graph.param[name] for name in op.params),
        outputs=tuple(item.name for item in items) or (op.name,),
        loss=None,
        batch=graph.static_batch or _ROWS,
        static_batch=graph.static_batch,
        training=True,  # a rule is tried backward, too
        autocast=graph.autocast,
    )


def _sizes(graph: Graph, op: Op) -> list[Op]:
    """Return the ops that make the numbers an op reads, in order."""
    found: dict[str, Op] = {}
    pending = list(op.refs)
    while pending:
        name = pending.pop()
        made = graph.op.get(name)
        if made is not None and not made.outputs:
            found[name] = made
            pending += made.refs
    return [made for made in graph.ops if made.name in found]


def _input(graph: Graph, name: str) -> Input:
    spec = graph.input[name].spec if name in graph.input else graph.op[name].outputs[0]
    return Input(name, (name,), spec)


# --------------------------------------------------------------------------- a rank by itself


_SPACE = "shard."


def alone(graph: Graph) -> Graph:
    """Put ops of torch in place of a rank's exchanges.

    Args:
        graph: one of `Sharded.members`, concrete (`at`).
    """
    return replace(graph, ops=tuple(_without_others(graph, op) for op in graph.ops))


def _without_others(graph: Graph, op: Op) -> Op:
    if not op.target.startswith(_SPACE):
        return op
    value, kind = op.args[0], op.target.removeprefix(_SPACE)
    if kind in ("all_reduce", "copy_to_group"):
        return replace(op, target="aten.alias.default", args=(value,))
    dim = op.args[1]
    assert isinstance(dim, int)
    wanted = int(op.outputs[0].shape[dim])
    if kind in ("split", "reduce_scatter"):
        return replace(op, target="aten.narrow.default", args=(value, dim, 0, wanted))
    rank, own = len(op.outputs[0].shape), _length(graph, value, dim)
    pads = (*(0,) * (2 * (rank - 1 - dim)), 0, wanted - own)  # the last dimension comes first
    return replace(op, target="aten.constant_pad_nd.default", args=(value, pads))


def _length(graph: Graph, value: Arg, dim: int) -> int:
    """Return how much of a dimension the rank has."""
    if isinstance(value, ParamRef):
        return int(graph.param[value.param].spec.shape[dim])
    assert isinstance(value, Ref)
    return int(graph.op[value.value].outputs[0].shape[dim])


# ------------------------------------------------------------------------------------------------
# Smaller sizes for a trial of a rule, where the model's own would take minutes and gigabytes.
#
#   3 rows x 2048 x 50272 words, axis of 50272   ──▶   3 rows x 8 x 50272
#
# Sizes beside the axis are divided by one power of two, wherever they stand: in shapes and
# arguments. Ratios of such sizes stay. Views that multiply a size with a fixed one may not:
# whether a reduced graph computes at all is for the process that runs the trial to find.


_LARGE = 1 << 22
"""Numbers in all tensors of a trial: below, it takes milliseconds as it is."""
_WIDE = 64
"""Sizes up to here stay: widths of a head, numbers of heads."""
_LEAST = 8
"""No size becomes smaller."""


def with_small_sizes(trial: Graph, axis: Axis) -> Graph | None:
    """Return a trial's graph in numbers, with smaller sizes beside those of the axis.

    Args:
        trial: an op by itself, with what it reads.
        axis: what of an axis lies in it.

    Returns:
        None where the trial is small as it is, where no size can be smaller, or where a tensor has
        gaps in memory.
    """
    graph = trial.at(trial.batch)
    if sum(spec.numel for spec in _specs_of(graph)) <= _LARGE:
        return None
    smaller = _smaller(graph, axis)
    if not smaller or not all(map(_is_dense, _specs_of(graph))):
        return None
    return replace(
        graph,
        ops=tuple(_op(op, smaller) for op in graph.ops),
        inputs=tuple(replace(e, spec=_spec(e.spec, smaller)) for e in graph.inputs),
        params=tuple(replace(p, spec=_spec(p.spec, smaller)) for p in graph.params),
    )


def _smaller(graph: Graph, axis: Axis) -> Mapping[int, int]:
    """Return sizes that become smaller, and what they become."""
    sizes = {int(dim) for spec in _specs_of(graph) for dim in spec.shape}
    open_sizes = {size for size in sizes if size > _WIDE} - _sizes_of(graph, axis)
    if not open_sizes:
        return {}
    factor = 1 << int(math.log2(min(open_sizes) / _LEAST))
    return {size: size // factor for size in open_sizes if size % factor == 0}


def _sizes_of(graph: Graph, axis: Axis) -> set[int]:
    """Return the sizes of the dimensions that an axis lies in."""
    spec = {op.name: op.outputs[0] for op in graph.ops if op.outputs}
    for entry in graph.inputs:
        spec[entry.name] = entry.spec
    for param in graph.params:
        spec[param.name] = param.spec
    places = (p for p in (*axis.values, *axis.params) if p.name in spec)
    return {axis.size, *(int(spec[place.name].shape[place.dim]) for place in places)}


def _specs_of(graph: Graph) -> Iterator[TensorSpec]:
    yield from (entry.spec for entry in graph.inputs)
    yield from (param.spec for param in graph.params)
    yield from (spec for op in graph.ops for spec in op.outputs)


def _is_dense(spec: TensorSpec) -> bool:
    return _strides(spec) == tuple(map(int, spec.strides)) or spec.numel == 0


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps that lies in memory in the same order."""
    shape, found = [int(dim) for dim in spec.shape], [0] * len(spec.shape)
    step = 1
    for dim in reversed(memory_order(shape, [int(n) for n in spec.strides])):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def _spec(spec: TensorSpec, smaller: Mapping[int, int]) -> TensorSpec:
    changed = replace(spec, shape=tuple(smaller.get(int(dim), int(dim)) for dim in spec.shape))
    return replace(changed, strides=_strides(changed))


def _op(op: Op, smaller: Mapping[int, int]) -> Op:
    def changed(arg: Arg) -> Arg:
        if isinstance(arg, int) and not isinstance(arg, bool):
            return smaller.get(arg, arg)
        return arg

    outputs = tuple(_spec(spec, smaller) for spec in op.outputs)
    return replace(with_args(op, changed), outputs=outputs)
