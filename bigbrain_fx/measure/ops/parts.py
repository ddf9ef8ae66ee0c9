"""Measured parts of a model: the whole, and the different parts of a tensor-parallel group.

This file knows how a model is divided; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbrain_fx.core import Graph, Shard
from bigbrain_fx.frontend import Captured, taken
from bigbrain_fx.plan import Options, alone, sharded, wanted_axes


@dataclass(frozen=True)
class Part:
    """A graph and its tensors.

    Attributes:
        name: "" for the whole, or "part 1 of 2:1".
        graph: symbolic; with exchanges, if it is a rank's.
    """

    name: str
    graph: Graph
    tensors: Mapping[str, Tensor]

    def at(self, rows: int) -> Graph:
        """Return what is run for so many rows, in numbers."""
        return alone(self.graph.at(rows))


def parts(captured: Captured, shares: Sequence[int], axes: Sequence[str]) -> Iterator[Part]:
    """Yield the whole model, and what different ranks of a group have of it.

    Args:
        captured: the model.
        shares: of a tensor group's ranks; fewer than two: the whole only.
        axes: names of those to divide; empty: all, as in `split`.

    Raises:
        InputError: there is no such axis, or none for so many ranks.
    """
    yield Part("", captured.graph, captured.tensors)
    if len(shares) < 2:
        return
    options = Options(tensor=len(shares), tensor_shares=tuple(shares), tensor_axes=tuple(axes))
    made = sharded(captured.graph, wanted_axes(captured.graph, options), shares)
    known: set[tuple[int, ...]] = set()
    for member, graph in enumerate(made.members):
        own = [shard for shard in made.shards if shard.member == member]
        lengths = tuple(shard.stop - shard.start for shard in own)
        if lengths not in known:
            known.add(lengths)
            said = ":".join(f"{share}" for share in shares)
            yield Part(f"part {member + 1} of {said}", graph, _taken(captured.tensors, own))


def _taken(tensors: Mapping[str, Tensor], own: Sequence[Shard]) -> dict[str, Tensor]:
    """Return the tensors as a rank has them; one of several names stays one."""
    shard = {each.param: each for each in own}
    cut = {
        id(tensors[name]): taken(tensors[name], each).clone(memory_format=torch.contiguous_format)
        for name, each in shard.items()
    }
    return {name: cut.get(id(tensor), tensor) for name, tensor in tensors.items()}
