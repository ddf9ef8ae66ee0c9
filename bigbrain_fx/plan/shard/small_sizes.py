"""Smaller sizes for a trial of a rule, where the model's own would take minutes and gigabytes.

    3 rows x 2048 x 50272 words, axis of 50272   ──▶   3 rows x 8 x 50272

Sizes beside the axis are divided by one power of two, wherever they stand: in shapes and arguments.
Ratios of such sizes stay. Views that multiply a size with a fixed one may not: whether a reduced
graph computes at all is for the process that runs the trial to find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bigbrain_fx.core import Arg, Axis, Graph, Op, TensorSpec, memory_order

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
    if sum(spec.numel for spec in _specs(graph)) <= _LARGE:
        return None
    smaller = _smaller(graph, axis)
    if not smaller or not all(map(_is_dense, _specs(graph))):
        return None
    return replace(
        graph,
        ops=tuple(_op(op, smaller) for op in graph.ops),
        inputs=tuple(replace(e, spec=_spec(e.spec, smaller)) for e in graph.inputs),
        params=tuple(replace(p, spec=_spec(p.spec, smaller)) for p in graph.params),
    )


def _smaller(graph: Graph, axis: Axis) -> Mapping[int, int]:
    """Return sizes that become smaller, and what they become."""
    sizes = {int(dim) for spec in _specs(graph) for dim in spec.shape}
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


def _specs(graph: Graph) -> Iterator[TensorSpec]:
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
    return replace(
        op,
        args=tuple(_arg(arg, smaller) for arg in op.args),
        kwargs=tuple((key, _arg(arg, smaller)) for key, arg in op.kwargs),
        outputs=tuple(_spec(spec, smaller) for spec in op.outputs),
    )


def _arg(arg: Arg, smaller: Mapping[int, int]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_arg(each, smaller) for each in arg)
    if isinstance(arg, int) and not isinstance(arg, bool):
        return smaller.get(arg, arg)
    return arg
