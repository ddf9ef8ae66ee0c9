"""Put the messages around a device's computations: orders of computations become Programs.

The order written here is the contract with the emitter, which writes the same order as text:

    Recv activations, Forward, Send activations        each in the order of `stages.into` / `out_of`
    Recv gradients,   Backward, Send gradients, Send parts of buckets that are there
    BackwardWeight, Send parts of buckets that waited for it
    Recv parts of buckets, Send summed pieces, Recv them               once, after all micro-batches
    Send shards across, Recv shards across; Send statistics, Recv statistics       once, likewise
    Send tied, Recv tied, Send norm, Recv norm, Send loss, Recv loss, OptimizerStep

With ZeRO the pieces of updated weights go back after the OptimizerStep, in place of gradients. With
ZeRO 3 they do not: the weights that each Forward and each Backward reads come before it, see
`gathers`. Where each micro-batch is summed by itself, others' with lower numbers are taken after
the Backward, or the BackwardWeight, that sends its own part.

Edges with both ends on one device have no instruction. The module knows nothing of times or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    Edge,
    EdgeKind,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.gathers import parts, turns_of, with_gathers

Orders: TypeAlias = dict[str, tuple[Compute, ...]]
"""What each device computes, in order."""

OnceAStep: TypeAlias = Mapping[tuple[str, EdgeKind], Sequence[Send | Recv]]
"""By device and kind: first all that it sends, then all that it receives."""
ONCE: tuple[EdgeKind, ...] = ("across", "statistics", "tied", "norm", "loss")
"""Messages of a step, in this order, before the optimizer steps."""


def with_messages(stages: Stages, orders: Orders, trained: frozenset[int]) -> tuple[Program, ...]:
    """Return one program per device, in the order of `stages.devices`."""
    once = once_a_step(stages) if trained else {}
    programs = [
        Program(device, tuple(_instructions(stages, device, orders[device], once, bool(trained))))
        for device in stages.devices
    ]
    return with_gathers(stages, programs)


def _instructions(
    stages: Stages, device: str, order: tuple[Compute, ...], once: OnceAStep, training: bool
) -> Iterator[Instruction]:
    last = {(type(compute), compute.stage): compute for compute in order}
    taken: set[Recv] = set()
    for compute in order:
        yield from _surrounded(stages, compute)
        if not isinstance(compute, Forward):
            is_last = compute is last[type(compute), compute.stage]
            early = [*_parts_with(stages, compute, is_last)]
            taken.update(each for each in early if isinstance(each, Recv))
            yield from early
    if training:
        yield from (each for each in _late(stages, device) if each not in taken)
        yield from _update(stages, device, once)


def _update(stages: Stages, device: str, once: OnceAStep) -> Iterator[Instruction]:
    pieces = once.get((device, "gather"), ())
    if not stages.zero_stage:
        yield from pieces
    for kind in ONCE:
        yield from once.get((device, kind), ())
    yield OptimizerStep()
    if stages.zero_stage and not stages.gathers:
        yield from pieces


def _parts_with(
    stages: Stages, backward: Backward | BackwardWeight, is_last: bool
) -> Iterator[Send | Recv]:
    """Yield what follows a backward: parts that are complete, and those of others that are due.

    Due are parts of others with lower numbers: the sum takes them in the order of their numbers.
    """
    waited = isinstance(backward, BackwardWeight)
    edges = stages.out_of(backward.stage, "reduce")
    edges = tuple(e for e in edges if stages.waits_for(e.value, backward.stage) == waited)
    if stages.sums_each:
        yield from (Send(edge, backward.micro) for edge in edges)
        yield from _due(stages, backward)
    elif is_last:
        yield from (Send(edge, part) for edge in edges for part in _parts(stages, edge))


def _due(stages: Stages, backward: Backward | BackwardWeight) -> Iterator[Recv]:
    """Yield the parts of others between this micro-batch and the replica's one before it."""
    waited = isinstance(backward, BackwardWeight)
    own = stages.micros_of(backward.stage, 0)
    before = max((m for m in own if m < backward.micro), default=-1)
    for recv in _of_stage(stages, backward.stage):
        due = recv.micro is not None and before < recv.micro < backward.micro
        if due and stages.waits_for(recv.edge.value, backward.stage) == waited:
            yield recv


def _late(stages: Stages, device: str) -> Iterator[Recv]:
    for stage in reversed(stages.of(device)):
        yield from _of_stage(stages, stage.index)


def _of_stage(stages: Stages, stage: int) -> Iterator[Recv]:
    """Yield the parts that others send to a stage's device: by bucket, in the order of its sum."""
    for bucket in stages.buckets:
        edges = [e for e in stages.into(stage, "reduce") if e.value == bucket.name]
        found = [Recv(edge, part) for edge in edges for part in _parts(stages, edge)]
        yield from sorted(found, key=lambda recv: recv.micro or 0)


def _parts(stages: Stages, edge: Edge) -> tuple[int | None, ...]:
    return parts(stages, stages.stages[edge.source].replica)


def _surrounded(stages: Stages, compute: Compute) -> Iterator[Instruction]:
    if isinstance(compute, BackwardWeight):
        yield compute
        return
    kind: EdgeKind = "activation" if isinstance(compute, Forward) else "gradient"
    for edge in stages.into(compute.stage, kind):
        if not stages.is_local(edge):
            yield Recv(edge, compute.micro)
    yield compute
    for edge in stages.out_of(compute.stage, kind):
        if not stages.is_local(edge):
            yield Send(edge, compute.micro)


def once_a_step(stages: Stages) -> OnceAStep:
    """Return what devices send others, and what they receive, that no micro-batch is of."""
    found: dict[tuple[str, EdgeKind], list[Send | Recv]] = {}
    far = [edge for edge in stages.edges if not stages.is_local(edge)]
    every: list[tuple[int, Send | Recv]] = [(edge.source, Send(edge, None)) for edge in far]
    every += [(edge.target, Recv(edge, None)) for edge in far]
    for stage, each in every:
        found.setdefault((stages.stages[stage].device, each.edge.kind), []).append(each)
    return found


def messages(stages: Stages, edge: Edge) -> int:
    """Return how many messages of a step an edge between replicas carries."""
    if edge.kind == "gather" and stages.gathers:
        return turns_of(stages, edge.target)
    return len(_parts(stages, edge)) if edge.kind == "reduce" else 1


# ------------------------------------------------------------------------------------------------
# Orders of several replicas: each by itself, as a schedule orders the stages of one model.


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
