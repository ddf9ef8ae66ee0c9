"""The plan of one replica -> whether another may be cut like it, and what replicas share.

The module plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bigbrain_fx.core import Cluster, Graph, Placement, Stages
from bigbrain_fx.errors import InputError
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
    """Whether a replica has the same cut for so many micro-batches."""
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


# ------------------------------------------------------------------------------------------------
# What torch.distributed's collectives need of replicas that sum by them: refused in words else.


_WITHOUT = "leave --all-reduce-order backend out: our own sums do not need it"


def require_collectives(plan: Plan) -> None:
    """Refuse replicas whose processes would not meet in the same collectives in the same order.

    A group of processes has one for each place of the pipeline, and calls collectives bucket by
    bucket. It calls them for each micro-batch with ZeRO 2, else once a step.

    Raises:
        InputError: replicas have different cuts, or several kinds of devices; or with ZeRO 2 they
            have unequal shares or backwards in two parts.
    """
    stages = plan.stages
    if len(set(map(len, _cuts(stages)))) > 1 or len(set(_cuts(stages))) > 1:
        raise InputError(
            "--all-reduce-order backend sums stage by stage, and these replicas are cut unlike",
            code="BX1274",
            help=f"give each replica as many equal devices, or {_WITHOUT}",
        )
    kinds = sorted({plan.cluster.device[name].kind for name in stages.devices})
    if len(kinds) > 1:
        raise InputError(
            "--all-reduce-order backend is for devices of one kind, and these are "
            f"{' and '.join(kinds)}",
            code="BX1275",
            help=_WITHOUT,
        )
    if stages.zero_stage == 2:
        require_alike_micros(stages.micros)
        _require_whole_backwards(stages)


def _cuts(stages: Stages) -> list[tuple[tuple[str, ...], ...]]:
    """Return the ops of each stage, by replica."""
    return [
        tuple(stage.ops for stage in stages.of_replica(number)) for number in range(stages.replicas)
    ]


def require_alike_micros(micros: Sequence[Sequence[int]]) -> None:
    """Refuse replicas that have not each a collective for the other's micro-batch."""
    counts = [len(own) for own in micros]
    if len(set(counts)) > 1:
        raise InputError(
            "--zero 2 --all-reduce-order backend sums micro-batches one of each replica "
            "together, and "
            f"they have {', '.join(map(str, counts))}",
            code="BX1276",
            at="--replica-ratio",
            help=f"--replica-ratio {':'.join('1' * len(counts))}, --zero 1, or --all-reduce-order "
            "micro",
        )


def _require_whole_backwards(stages: Stages) -> None:
    """Refuse gradients that come after their stage's backward, and its collective."""
    if stages.deferring:
        raise InputError(
            "--zero 2 --all-reduce-order backend sums a stage's gradients after its backward, and "
            "here "
            "some come later",
            code="BX1277",
            help="use --schedule 1f1b, --zero 1, or --all-reduce-order micro",
        )
