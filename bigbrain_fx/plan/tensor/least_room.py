"""Tensor groups -> whether their weights fit at all, before anything is planned for them.

    weights + gradients + state of a member's parts, all stages  <=  what all of its devices hold

A plan holds that much and more, so what does not fit by it has no plan: a search for one would try
each partitioner, and refuse what it finds. It knows sizes and devices; it plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bigbrain_fx.core import Cluster, Graph, TensorParallel
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.least_memory import held_bytes
from bigbrain_fx.plan.memory_check import tensor_bytes
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.shard import lengths

WHY = "weights, gradients and the optimizer's state do not fit into the devices' memory"


def require_room(graph: Graph, cluster: Cluster, source: Source, tensor: TensorParallel) -> None:
    """Refuse groups whose members cannot hold what they train.

    Raises:
        NoPlanError: one of them cannot.
        InputError: an axis has fewer parts than there are members.
    """
    held = held_bytes(graph, source)
    for member, least in enumerate(_parts(graph, tensor, held)):
        room = sum(tensor_bytes(cluster.device[group[member]]) + 1 for group in tensor.groups)
        if least > room:
            raise NoPlanError(WHY, code="BX1340")


def _parts(graph: Graph, tensor: TensorParallel, held: Mapping[str, float]) -> Iterator[float]:
    """Yield what each member has of all tensors."""
    divided = {
        graph.param[place.name].canonical: axis for axis in tensor.axes for place in axis.params
    }
    each = {axis.name: lengths(axis.size, tensor.shares) for axis in tensor.axes}
    for member in range(tensor.members):
        yield sum(
            nbytes * each[divided[name].name][member] / divided[name].size
            if name in divided
            else nbytes
            for name, nbytes in held.items()
        )
