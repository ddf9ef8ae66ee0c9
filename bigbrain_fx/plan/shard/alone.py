"""A member's graph -> one that runs without the others: as many numbers, as long, no messages.

What the others would send is what the member has itself, or zeros: every op takes what it takes in
a group, and the numbers mean nothing. It is what `profile` runs.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref

_SPACE = "shard."


def alone(graph: Graph) -> Graph:
    """Put ops of torch in place of a member's exchanges.

    Args:
        graph: one of `Sharded.members`, concrete (`at`).
    """
    return replace(graph, ops=tuple(_alone(graph, op) for op in graph.ops))


def _alone(graph: Graph, op: Op) -> Op:
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
    """Return how much of a dimension the member has."""
    if isinstance(value, ParamRef):
        return int(graph.param[value.param].spec.shape[dim])
    assert isinstance(value, Ref)
    return int(graph.op[value.value].outputs[0].shape[dim])
