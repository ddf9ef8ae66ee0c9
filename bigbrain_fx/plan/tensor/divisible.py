"""Axes of a graph that a tensor-parallel group could divide: their shares of work and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.plan.shard import axes, chosen_axes, family, priced_axes
from bigbrain_fx.plan.tensor.choices import alike

_MEMBERS = 2  # of the group whose choice is shown


@dataclass(frozen=True)
class DivisibleAxis:
    """Axes of identical layers that a group of devices could divide.

    Attributes:
        name: as `--tp-axes` takes it, with `*` for the numbers of layers.
        kind: heads, hidden, vocabulary, channels, ...
        count: number of axes that differ only in the number of their layer.
        size: number of parts of each.
        chosen: number of them that a group of two divides unless axes are named.
        flops_share: share of the forward work that they divide.
        weight_share: share of the bytes of parameters that they divide.
        forward_bytes, backward_bytes: size of the tensors that dividing them exchanges for one
            example batch.
        whole: kinds of ops that have the axis and need all of it.
    """

    name: str
    kind: str
    count: int
    size: int
    chosen: int
    flops_share: float
    weight_share: float
    forward_bytes: int
    backward_bytes: int
    whole: tuple[str, ...]


def divisible_axes(graph: Graph) -> tuple[DivisibleAxis, ...]:
    """List the axes of a graph, those that divide most work first."""
    every = priced_axes(graph, axes(graph))
    chosen = {axis.name for axis in chosen_axes(every, _MEMBERS)}
    work = sum(int(op.flops) for op in graph.at(graph.batch).ops)
    held = sum(p.spec.nbytes for p in graph.params if p.name == p.canonical)
    rows = [
        DivisibleAxis(
            name,
            same[0].kind,
            len(same),
            size,
            sum(axis.name in chosen for axis in same),
            sum(axis.flops for axis in same) / max(1, work),
            sum(axis.nbytes for axis in same) / max(1, held),
            sum(axis.sent_bytes(backward=False) for axis in same),
            sum(axis.sent_bytes(backward=True) for axis in same),
            tuple(dict.fromkeys(_families(graph, same))),
        )
        for (name, size), same in alike(every).items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.flops_share, -row.weight_share)))


def _families(graph: Graph, same: Sequence[Axis]) -> Iterator[str]:
    for name in (name for axis in same for name in axis.whole):
        target = graph.op[name].target
        yield family(target) or target.rpartition(".")[2]
