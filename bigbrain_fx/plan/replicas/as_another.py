"""The plan of one replica -> whether another may be cut so, and its placement there."""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.core import Cluster
from bigbrain_fx.plan.nouns import Plan
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
