"""Orders of several replicas: each by itself, as a schedule orders the stages of one model.

This file knows which numbers stages and micro-batches have in a replica and in the whole step; it
knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from bigbrain_fx.core import Compute, Edge, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders

OrderOne: TypeAlias = Callable[
    [Stages, int, StageCosts, frozenset[int], tuple[int, ...] | None], Orders
]
"""Order one replica: its stages from 0, its micro-batches from 0, and its own in_flight."""


def order_replicas(
    order: OrderOne,
    stages: Stages,
    costs: StageCosts,
    trained: frozenset[int],
    in_flight: tuple[int, ...] | None,
) -> Orders:
    """Order every replica and give stages and micro-batches their numbers of the whole step."""
    found: Orders = {}
    within = _within(stages)
    for number, micros in enumerate(stages.micros):
        part, first = _part(stages, number, within.get(number, ()))
        held = range(first, first + len(part.stages))
        own = frozenset(stage - first for stage in trained if stage in held)
        limits = _limits(stages, part, in_flight)
        orders = order(part, len(micros), costs.part(held), own, limits)
        _require_apart(stages, found, part)
        found.update(
            (device, tuple(_numbered(each, first, micros) for each in computes))
            for device, computes in orders.items()
        )
    return found


def _require_apart(stages: Stages, found: Orders, part: Stages) -> None:
    """Refuse a device of two replicas: each by itself says nothing of what it does in between."""
    for device in part.devices:
        if device in found:
            raise InputError(
                f"device {device} is part of replicas "
                f"{' and '.join(map(str, stages.replicas_on(device)))}, and this schedule orders "
                "each replica by itself",
                code="BX1315",
                help="use --schedule gems, or give each replica devices of its own",
            )


def _within(stages: Stages) -> Mapping[int, Sequence[Edge]]:
    """Return the edges whose ends are of one replica, by its number."""
    found: dict[int, list[Edge]] = {}
    for edge in stages.edges:
        source, target = stages.stages[edge.source], stages.stages[edge.target]
        if source.replica == target.replica:
            found.setdefault(source.replica, []).append(edge)
    return found


def _part(stages: Stages, replica: int, within: Sequence[Edge]) -> tuple[Stages, int]:
    """Return one replica's stages, numbered from 0, and the number that its first one has."""
    own = stages.of_replica(replica)
    first = own[0].index
    renumbered = tuple(replace(stage, index=stage.index - first, replica=0) for stage in own)
    edges = tuple(
        replace(edge, source=edge.source - first, target=edge.target - first) for edge in within
    )
    return Stages(renumbered, edges, stages.moved), first


def _limits(
    stages: Stages, part: Stages, in_flight: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return what may be in flight on a replica's devices, of the numbers of all devices."""
    if in_flight is None:
        return None
    of = dict(zip(stages.devices, in_flight, strict=True))
    return tuple(of[device] for device in part.devices)


def _numbered(compute: Compute, first: int, micros: tuple[int, ...]) -> Compute:
    return type(compute)(compute.stage + first, micros[compute.micro])
