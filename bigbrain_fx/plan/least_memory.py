"""What any plan holds at least, before anything is planned: a bound that refuses at once.

    weights + gradients + state of the whole model  <=  what all devices hold together

Replicas and tensor groups divide that or hold it several times; recompute and more micro-batches
change none of it. It knows sizes and devices; it plans nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Device, Graph, Offloaded, Param
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.memory_check import mib, process_of, tensor_bytes
from bigbrain_fx.plan.nouns import Source


def held_bytes(
    graph: Graph, source: Source, offload: Sequence[Offloaded] = ()
) -> Mapping[str, float]:
    """Return what each tensor of the model takes where it is whole, by its own name."""
    read = {name for op in graph.ops for name in op.params}
    return {
        param.canonical: param.spec.nbytes * (1 + _besides(param, graph, source, offload))
        for param in graph.params
        if param.name in read
    }


def _besides(param: Param, graph: Graph, source: Source, offload: Sequence[Offloaded]) -> float:
    """Return how many times a tensor's own bytes its gradient and state take."""
    if not (graph.training and param.is_trained):
        return 0.0
    if "state" in offload:
        return 1.0
    return 1 + source.optimizer_states.get(param.canonical, source.optimizer_state)


def require_enough(
    graph: Graph, cluster: Cluster, source: Source, offload: Sequence[Offloaded]
) -> None:
    """Refuse a model that all devices together cannot hold, however it is split.

    Raises:
        NoPlanError: with what it holds at least, and what each device has room for.
    """
    if "weights" in offload:
        return
    least = sum(held_bytes(graph, source, offload).values())
    room = sum(map(_room_bytes, cluster.devices))
    if least <= room + len(cluster.devices):  # what each needs is rounded down
        return
    raise NoPlanError(
        f"no split fits into the devices' memory: the model needs {mib(int(least))} at least, and "
        f"together they have room for {mib(int(room))} of tensors",
        code="BX1343",
        notes=(_arithmetic(graph, source, offload, room), *map(_has, cluster.devices)),
        help="use more devices, or devices with more memory",
    )


def _arithmetic(graph: Graph, source: Source, offload: Sequence[Offloaded], room: float) -> str:
    """Return what the whole model needs and the cluster has, and what the need is made of."""
    least = sum(held_bytes(graph, source, offload).values())
    weights = sum(held_bytes(replace(graph, training=False), source).values())
    both = sum(held_bytes(graph, source, ("state",)).values())
    parts = {"weights": weights, "gradients": both - weights, "optimizer": least - both}
    made_of = ", ".join(f"{name} {mib(int(count))}" for name, count in parts.items() if count)
    return f"the cluster needs {mib(int(least))} and has {mib(int(room))} for tensors: {made_of}"


def _room_bytes(device: Device) -> float:
    return max(0.0, tensor_bytes(device))


def _has(device: Device) -> str:
    """Say what a device has, and how much of it tensors may take."""
    context = f"{mib(process_of(device).context_bytes)} are the process's"
    room = int(_room_bytes(device))
    holds = f"{mib(room)} are for tensors" if room else "there is no room for tensors"
    return f"{device.name} has {mib(device.memory_bytes)}: {context}, and {holds}"
