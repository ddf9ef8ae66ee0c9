"""The plan of one replica -> whether another may be cut so, and what all together take over.

It plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bigbrain_fx.core import Cluster, Graph, Placement
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.replica_cut import cut_replicas
from bigbrain_fx.planning import nameless

LONG, ABOUT = 8, 2
"""Micro-batches of a replica for each of its devices from which on it is cut the same for more or
fewer of them, and how many times as many these may be."""
SAME = 1.01
"""Times the step of a replica with other links that another may take as it is cut: see `apart`."""


def is_plain(plan: Plan) -> bool:
    """Whether a replica of whole backwards has nothing that was chosen for its devices but cuts."""
    stages = plan.stages
    more = plan.placement.tensor or stages.deferring or stages.again or stages.offload
    return not (more or stages.asynchronous)


def is_long(plan: Plan, micro_batches: int) -> bool:
    """Whether a replica is cut alike for so many micro-batches."""
    few = sorted((plan.micro_batches, micro_batches))
    return few[0] >= LONG * len(plan.cluster.devices) and few[1] <= ABOUT * few[0]


def has_kinds(plan: Plan, cluster: Cluster) -> bool:
    """Whether a replica's devices are of the same kinds, whatever links they have."""
    return [*map(nameless, plan.cluster.devices)] == [*map(nameless, cluster.devices)]


def renamed(plan: Plan, cluster: Cluster) -> Mapping[str, str]:
    """Return a plan's placement on the devices of a cluster like its own."""
    to = names(plan, cluster)
    return {op: to[device] for op, device in plan.placement.device_of.items()}


def names(plan: Plan, cluster: Cluster) -> Mapping[str, str]:
    """Return what the devices of a plan are called in a cluster like its own."""
    return {a.name: b.name for a, b in zip(plan.cluster.devices, cluster.devices, strict=True)}


def schedule_of(alone: Sequence[Plan], placement: Placement) -> str:
    """Return the schedule of all replicas: the one that each has, or what runs any stages."""
    schedules = {plan.schedule for plan in alone}
    pairs = zip(placement.replicas, alone, strict=True)
    has_breaks = any(set(each.breaks) != set(plan.placement.breaks) for each, plan in pairs)
    return "list" if has_breaks or len(schedules) > 1 else schedules.pop()


def in_flight_of(alone: Sequence[Plan], schedule: str) -> tuple[int, ...] | None:
    """Return what may be in flight on all devices, where a replica's plan says it of its own."""
    if all(plan.in_flight is None for plan in alone) or schedule == "list":
        return None
    return tuple(n for plan in alone for n in plan.in_flight or _classic(plan))


def _classic(plan: Plan) -> tuple[int, ...]:
    """Return 1F1B's own choice: a device fewer for each that comes before; of groups, a group."""
    return tuple(range(len(plan.stages.devices) // plan.stages.members, 0, -1))


def again_of(graph: Graph, placement: Placement, rows: int, alone: Sequence[Plan]) -> Iterator[int]:
    """Yield the stages that run what their replica's own plan runs again."""
    again = [
        {name for stage in plan.stages.stages if stage.runs_again for name in stage.ops}
        for plan in alone
    ]
    if not any(again):
        return
    for stage in cut_replicas(graph, placement, rows).stages:
        own = set(stage.ops) - set(stage.recomputed)
        if own & again[stage.replica]:
            yield stage.index
