"""Sharing among replicas, in a sentence. The module reads stages and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster, Stages

_ORDERS = {
    "replica": "each replica's own first, then replica by replica",
    "micro": "micro-batch by micro-batch, as one process does",
    "tree": "by the binary tree of micro-batch numbers, the same for any replicas",
    "backend": "by torch.distributed's own collectives, equal to one process's to rounding; so no "
    "process is replaced, and a run that ends goes on from its newest checkpoint (on several GPUs "
    "this was not tried)",
}
_ZERO = "each replica keeps the optimizer's state of its share of the parameters"
_KEPT = {
    0: "",
    1: f"; ZeRO 1: {_ZERO}",
    2: f"; ZeRO 2: {_ZERO}, and their gradients",
    3: f"; ZeRO 3: {_ZERO}, their gradients and the weights themselves, which the others gather "
    "before each forward and each backward of a stage and let go of after it",
}


def replicas_text(stages: Stages) -> str:
    """Say which replica computes what and how gradients are summed; nothing, where one is all."""
    if not stages.micros:
        return ""
    own = (
        f"{'+'.join(dict.fromkeys(stage.device for stage in stages.of_replica(number)))} "
        f"has {_ranges(micros)}"
        for number, micros in enumerate(stages.micros)
    )
    order = f"Gradients are added {_ORDERS[stages.sum_order]}"
    count = f"{stages.replicas} replicas" if stages.replicas > 1 else "1 replica"
    where = ", two and two on the same devices, one in reverse" if is_shared(stages) else ""
    shares = f"{count}{where}: of the micro-batches {'; '.join(own)}"
    return f"{shares}. {order}{_KEPT[stages.zero_stage]}{_groups_text(stages)}"


def _groups_text(stages: Stages) -> str:
    """Say which replicas divide what ZeRO divides; nothing, where all do."""
    if not stages.shard_group:
        return ""
    starts = range(0, stages.replicas, stages.shards)
    groups = ", ".join(f"{first}-{first + stages.shards - 1}" for first in starts)
    return f"; replicas {groups} are shard groups, each of which has all shares"


def left_out_text(cluster: Cluster) -> str:
    """Name the devices that no replica of the cluster file has; nothing, where all are in one."""
    used = {name for group in cluster.replicas for name in group}
    rest = [device.name for device in cluster.devices if device.name not in used]
    if not (used and rest):
        return ""
    return f"not used, as no replica of the cluster file names them: {', '.join(rest)}"


def is_shared(stages: Stages) -> bool:
    """Whether two replicas share devices."""
    return any(len(stages.replicas_on(device)) > 1 for device in stages.devices)


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers shortly: 0-2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
