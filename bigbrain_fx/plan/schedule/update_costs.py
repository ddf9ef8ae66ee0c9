"""Time and memory of a device's optimizer: its seconds, and its state here or in the store.

The module knows parameters and stages, not ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bigbrain_fx.core import Costs, Graph, Param, Stage, Stages
from bigbrain_fx.plan.cut import updating
from bigbrain_fx.plan.offloading import STORED_FROM_BYTES, both_ways_s
from bigbrain_fx.plan.schedule.stage_part import optimizer_temporary_bytes, rounded


def params_of(graph: Graph, stages: Iterable[Stage]) -> tuple[Param, ...]:
    """Return the parameters, buffers and constants of some stages; tied names count once."""
    found = {
        graph.param[name].canonical: graph.param[name] for stage in stages for name in stage.params
    }
    return tuple(found.values())


def trainable(graph: Graph, stages: Iterable[Stage]) -> tuple[Param, ...]:
    """Return the parameters of some stages that are trained; tied names count once."""
    return tuple(param for param in params_of(graph, stages) if param.is_trained)


def kept_params(graph: Graph, stages: Stages, device: str) -> tuple[Param, ...]:
    """Return the parameters that a device always holds: with ZeRO 3, its share of trained ones.

    Where weights are offloaded, buffers alone.
    """
    found = params_of(graph, stages.of(device))
    if "weights" in stages.offload:
        return tuple(param for param in found if param.kind != "parameter")
    if not stages.gathers:
        return found
    own = {param.canonical for param in _updated(graph, stages, device)}
    others = {param.canonical for param in trainable(graph, stages.of(device))} - own
    return tuple(param for param in found if param.canonical not in others)


def bytes_of(params: Iterable[Param], kind: str) -> int:
    """Return the bytes of parameters as a kind of device allocates them."""
    return sum(rounded(param.spec.nbytes, kind) for param in params)


def older_bytes(graph: Graph, stages: Stages, device: str, kind: str) -> int:
    """Return what a device holds of weights before their newest update, where steps overlap."""
    if not stages.asynchronous:
        return 0
    own = stages.of(device)
    return bytes_of(trainable(graph, own), kind) * (stages.versions(own[0].index) - 1)


def _updated(graph: Graph, stages: Stages, device: str) -> tuple[Param, ...]:
    """Return the parameters that a device's optimizer updates: with ZeRO, its replica's share."""
    own = stages.of(device)
    found = trainable(graph, own)
    if not stages.zero_stage:
        return found
    updates, shard = updating(graph, stages), stages.shard_of(own[0].replica)
    return tuple(p for p in found if updates.get(p.canonical) == shard)


def optimizer_workspace(graph: Graph, stages: Stages, costs: Costs) -> Mapping[str, int]:
    """Return what the optimizer holds for a moment, besides gradients and state.

    Clipping makes all gradients anew before the old ones go, and tied ones are summed into new
    tensors.
    """
    tied = {
        (edge.value, stages.stages[edge.target].device)
        for edge in stages.edges
        if edge.kind == "tied"
    }
    clips = any(edge.kind == "norm" for edge in stages.edges)
    found = {}
    for device in stages.devices:
        kind = costs.cluster.device[device].kind
        params = _updated(graph, stages, device)
        here_bytes = _piece_bytes(graph, stages, costs, device)
        sizes = [rounded(param.spec.nbytes, kind) for param in params]
        copies = sum(sizes) if clips else 0
        if "weights" in stages.offload:  # a piece of them, with gradients, as large as the largest
            copies = (3 if clips else 2) * max(map(pages_bytes, sizes), default=0)
        copies += bytes_of((graph.param[name] for name, where in tied if where == device), kind)
        together = [max(sizes)] if here_bytes and kind == "cuda" else sizes
        temporary = optimizer_temporary_bytes(
            together,
            costs.optimizer_temporaries,
            costs.optimizer_leftover,
            at_once=kind == "cuda" and costs.optimizer_at_once,
        )
        found[device] = copies + temporary + here_bytes
    return found


def _piece_bytes(graph: Graph, stages: Stages, costs: Costs, device: str) -> int:
    """Return the most bytes of a state that are fetched at once: of parameters as large as one.

    Where parameters have different states, smaller ones that are fetched together may be those of
    the most.
    """
    if not stored_bytes(graph, stages, costs, device):
        return 0
    params = _updated(graph, stages, device)
    kind, usual = costs.cluster.device[device].kind, costs.optimizer_state_per_byte
    most = max(costs.optimizer_states.get(p.canonical, usual) for p in params)
    return int(most * max(rounded(param.spec.nbytes, kind) for param in params))


def resident_bytes(graph: Graph, stages: Stages, costs: Costs, device: str) -> int:
    """Return what an optimizer keeps on its device: all that does not lie in the store."""
    states = (
        _state_bytes(param, costs, device)
        for param in _updated(graph, stages, device)
        if not _is_stored(stages, param)
    )
    return int(sum(states))


def stored_bytes(graph: Graph, stages: Stages, costs: Costs, device: str) -> list[int]:
    """Return what an optimizer keeps in the device's store, of each parameter."""
    params = _updated(graph, stages, device) if stages.offload else ()
    return [int(_state_bytes(p, costs, device)) for p in params if _is_stored(stages, p)]


def _is_stored(stages: Stages, param: Param) -> bool:
    is_large = param.spec.nbytes >= STORED_FROM_BYTES or "weights" in stages.offload
    return "state" in stages.offload and is_large


def _state_bytes(param: Param, costs: Costs, device: str) -> float:
    kind, usual = costs.cluster.device[device].kind, costs.optimizer_state_per_byte
    per_byte = costs.optimizer_states.get(param.canonical, usual)
    return per_byte * rounded(param.spec.nbytes, kind)


def visiting_bytes(graph: Graph, stages: Stages, stage: Stage) -> int:
    """Return what of a stage's weights is here while it runs alone: those that lie in the store."""
    if "weights" not in stages.offload:
        return 0
    return sum(pages_bytes(p.spec.nbytes) for p in _weights(graph, (stage,)))


def stored_weights_bytes(graph: Graph, stages: Stages, device: str) -> tuple[int, int]:
    """Return the bytes of weights in a device's store, and of their gradients before the update."""
    if "weights" not in stages.offload:
        return 0, 0
    own = stages.of(device)
    leaves = [param for stage in own for param in trainable(graph, (stage,))]
    each = (_weights(graph, own), leaves)
    weights, gradients = (sum(pages_bytes(p.spec.nbytes) for p in found) for found in each)
    return weights, gradients


def _weights(graph: Graph, stages: Iterable[Stage]) -> tuple[Param, ...]:
    return tuple(param for param in params_of(graph, stages) if param.kind == "parameter")


def pages_bytes(nbytes: int) -> int:
    """Return the bytes of the pages that a tensor in a store takes."""
    return -(-max(1, nbytes) // STORED_FROM_BYTES) * STORED_FROM_BYTES


def optimizer_s(graph: Graph, stages: Stages, costs: Costs, device: str) -> float:
    """Return what an update takes; what lies in a store is read and written meanwhile."""
    trained = _updated(graph, stages, device)
    update_s = costs.optimizer_s(device, len(trained), sum(p.spec.nbytes for p in trained))
    return update_s + stored_s(graph, stages, costs, device)


def stored_s(graph: Graph, stages: Stages, costs: Costs, device: str) -> float:
    """Return what moving a device's part of the optimizer's state takes of a step.

    Weights are read for all forwards, for all backwards and for the update, which writes them back;
    gradients are written and read once. All of it is charged here, though it comes in between.
    """
    moved = sum(stored_bytes(graph, stages, costs, device))
    moved += 2 * sum(stored_weights_bytes(graph, stages, device)[:1])
    moved += sum(stored_weights_bytes(graph, stages, device)[1:])
    return both_ways_s(costs.cluster, device, moved) if moved else 0.0
