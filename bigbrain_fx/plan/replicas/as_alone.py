"""What all replicas together take over from the plans of each by itself. It plans nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigbrain_fx.core import Graph, Placement
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.replica_cut import cut_replicas


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
