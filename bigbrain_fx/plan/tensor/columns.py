"""Columns: a rank of each group has stages and programs like a pipeline's of its own.

    rank 0   [0] -> [1]      stages of rank m come after those of m-1, in the same order;
              |      |       exchanges between ranks are inside the stages
    rank 1   [2] -> [3]

A column may have replicas: rank m of a group sums with rank m of the same group in the others.
All ranks run one order of instructions: exchanges meet. This file knows stages and programs; it
knows no costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from bigbrain_fx.core import (
    Bucket,
    Cluster,
    Compute,
    Costs,
    Device,
    Edge,
    Forecast,
    Graph,
    Instruction,
    Placement,
    Program,
    Recv,
    Send,
    Stages,
    Statistics,
)
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.cut import on_devices
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.replica_cut import cut_replicas, with_waiting_buckets
from bigbrain_fx.plan.tensor.groups import Groups
from bigbrain_fx.weights import part_name

Mark: TypeAlias = Callable[[Graph, Stages], Stages]
"""Says of stages how they run: which defer, or run again."""
_SUMMED = (
    "reduce",
    "gather",
    "across",
    "statistics",
)  # edges that are named by what replicas share


def cut_columns(
    members: Sequence[Graph],
    groups: Sequence[Sequence[str]],
    placement: Placement,
    rows: int,
    mark: Mark,
    alike: Sequence[int],
) -> tuple[Stages, ...]:
    """Cut each rank's graph as the first one's is cut.

    Args:
        members: their graphs.
        groups: of devices; `placement` names the first of each.
        placement: of the first rank's ops.
        rows: of a micro-batch.
        mark: says how stages run.
        alike: for each rank the first that has as much of everything: they are cut once.

    Raises:
        InputError: as `cut_replicas` does, or a rank has nothing to sum where another has.
    """
    like = members[0]

    def cut(graph: Graph, own: Placement) -> Stages:
        stages = mark(graph, cut_replicas(graph, own, rows, like=like))
        return with_waiting_buckets(graph, own, rows, stages, like=like)

    first = cut(like, placement)
    columns = [first]
    for member, graph in enumerate(members[1:], start=1):
        if alike[member] < member:
            twin = {group[alike[member]]: group[member] for group in groups}
            columns.append(on_devices(columns[alike[member]], twin))
            continue
        to = {group[0]: group[member] for group in groups}
        columns.append(cut(graph, _placed_like(first, placement, to)))
        _require_same(first, columns[-1])
    return tuple(columns)


def _placed_like(first: Stages, placement: Placement, to: Mapping[str, str]) -> Placement:
    """Return another rank's placement; ops that were moved stay with the others."""

    def homes(device_of: Mapping[str, str], replica: int) -> dict[str, str]:
        own = first.of_replica(replica)
        moved = {name: s.device for s in own for name in s.ops if name not in s.recomputed}
        return {name: to[device] for name, device in {**device_of, **moved}.items()}

    return replace(
        placement,
        device_of=homes(placement.device_of, 0),
        replicas=tuple(
            replace(each, device_of=homes(each.device_of, number))
            for number, each in enumerate(placement.replicas)
        ),
    )


def _require_same(first: Stages, other: Stages) -> None:
    if [stage.ops for stage in first.stages] != [stage.ops for stage in other.stages]:
        raise AssertionError(
            "ranks of a tensor group have other stages: their graphs differ in numbers"
        )
    if list(map(_way, first.edges)) != list(map(_way, other.edges)):
        raise InputError(
            "ranks of a tensor group have parts of so few numbers that some replicas sum none",
            code="BX1338",
            at="--tp-ratio",
            help="leave --tp-ratio out, or use fewer --replicas",
        )


def _way(edge: Edge) -> tuple[object, ...]:
    return edge.kind, edge.value, edge.source, edge.target


def again_alike(columns: Sequence[Stages], first: Stages) -> tuple[Stages, ...]:
    """Let all ranks recompute what the first does: exchanges meet where they are recomputed."""
    return tuple(
        replace(
            column,
            stages=tuple(
                replace(own, again=its.again, runs_again=its.runs_again)
                for own, its in zip(column.stages, first.stages, strict=True)
            ),
        )
        for column in columns
    )


def joined_columns(columns: Sequence[Stages]) -> Stages:
    """Return the stages of all ranks as one list."""
    first, count, numbered = columns[0], len(columns[0].stages), [*enumerate(columns)]
    return Stages(
        tuple(
            replace(s, index=s.index + m * count, member=m) for m, c in numbered for s in c.stages
        ),
        tuple(_edge_of(edge, m, count) for m, c in numbered for edge in c.edges),
        first.moved,
        first.micros,
        tuple(_shared_by(bucket, m, count) for m, c in numbered for bucket in c.buckets),
        first.zero_stage,
        first.sum_order,
        tuple(_shared_by(each, m, count) for m, c in numbered for each in c.statistics),
        first.offload,
        saves=tuple(
            replace(each, stage=each.stage + m * count) for m, c in numbered for each in c.saves
        ),
        shard_group=first.shard_group,
    )


def _edge_of(edge: Edge, member: int, count: int) -> Edge:
    value = _name_of(edge.value, member) if edge.kind in _SUMMED else edge.value
    source, target = edge.source + member * count, edge.target + member * count
    return replace(edge, value=value, source=source, target=target)


SharedT = TypeVar("SharedT", Bucket, Statistics)


def _shared_by(each: SharedT, member: int, count: int) -> SharedT:
    """Return what replicas share of the first rank as it is among all."""
    stages = tuple(stage + member * count for stage in each.stages)
    return replace(each, name=_name_of(each.name, member), stages=stages)


def _name_of(name: str, member: int) -> str:
    """Name what replicas share of one rank: bucket0, bucket0[1]."""
    return part_name(name, member) if member else name


def part_of(stages: Stages, member: int) -> Stages:
    """Return one rank's stages and edges, with the numbers that they have among all.

    Norms, which all devices exchange, are left out.
    """
    own = stages.of_member(member)
    held = {stage.index for stage in own}
    edges = (edge for edge in stages.edges if {edge.source, edge.target} <= held)
    return replace(
        stages,
        stages=own,
        edges=tuple(edge for edge in edges if edge.kind != "norm"),
        buckets=tuple(each for each in stages.buckets if set(each.stages) <= held),
        statistics=tuple(each for each in stages.statistics if set(each.stages) <= held),
        saves=tuple(each for each in stages.saves if each.stage in held),
    )


def column_of(stages: Stages, member: int) -> Stages:
    """Return one rank's stages and edges, numbered from 0."""
    part = part_of(stages, member)
    first = part.stages[0].index
    return replace(
        part,
        stages=tuple(replace(stage, index=stage.index - first, member=0) for stage in part.stages),
        edges=tuple(
            replace(edge, source=edge.source - first, target=edge.target - first)
            for edge in part.edges
        ),
        buckets=tuple(_from_zero(each, first) for each in part.buckets),
        statistics=tuple(_from_zero(each, first) for each in part.statistics),
        saves=tuple(replace(each, stage=each.stage - first) for each in part.saves),
    )


def _from_zero(each: SharedT, first: int) -> SharedT:
    return replace(each, stages=tuple(stage - first for stage in each.stages))


def moved_programs(programs: Sequence[Program], stages: Stages, to: Stages) -> tuple[Program, ...]:
    """Return one column's programs as another column runs them, stage for stage."""
    edges = dict(zip(stages.edges, to.edges, strict=True))
    pairs = list(zip(stages.stages, to.stages, strict=True))
    devices = {a.device: b.device for a, b in pairs}
    numbers = {a.index: b.index for a, b in pairs}
    return tuple(
        Program(
            devices[program.device],
            tuple(
                _moved(each, edges, numbers)
                for each in program.instructions
                if not isinstance(each, Send | Recv) or each.edge in edges
            ),
        )
        for program in programs
        if program.device in devices
    )


def _moved(
    instruction: Instruction, edges: Mapping[Edge, Edge], numbers: Mapping[int, int]
) -> Instruction:
    if isinstance(instruction, Send | Recv):
        return type(instruction)(edges[instruction.edge], instruction.micro)
    if isinstance(instruction, Compute):
        return type(instruction)(numbers[instruction.stage], instruction.micro)
    return instruction


# ------------------------------------------------------------------------------------------------
# A forecast of groups -> less room for the first rank, where another rank lacks memory.
#
# What runs again is chosen by the first rank's ledger, and all ranks do as it does. So who
# lacks memory is told as the first one's lack.


def with_room_for_all(
    make: Callable[[Costs], tuple[Plan, Forecast, Forecast]],
    costs: Costs,
    cluster: Cluster,
    groups: Groups,
) -> tuple[Plan, Forecast]:
    """Return a plan in which more is recomputed until all ranks fit, or no more can be.

    Args:
        make: plans all ranks by the memory of the first ones. It returns their forecast, and that
            of the first ones, which knows no messages of groups.
        costs: of the first rank, with the first devices.
        cluster: with all devices.
        groups: whose first devices these are.
    """
    plan, forecast, first = make(costs)
    while True:
        less = with_less_room(costs, first, forecast, cluster, groups)
        if less.cluster == costs.cluster:
            return plan, forecast
        other, *others = make(less)
        if other.stages == plan.stages:
            return plan, forecast
        costs, plan, (forecast, first) = less, other, others


def with_less_room(
    costs: Costs, first: Forecast, forecast: Forecast, cluster: Cluster, groups: Groups
) -> Costs:
    """Return the first ranks' costs, with less memory where one of their groups lacks some.

    Args:
        costs: of the first rank, with the first devices.
        first: of them alone.
        forecast: of all ranks.
        cluster: with all devices.
        groups: whose first devices these are.
    """
    used = {entry.device for entry in forecast.devices}
    first_of = {group[0]: [name for name in group if name in used] for group in groups}

    def less(device: Device) -> Device:
        members = first_of.get(device.name, [])
        lacking = max((_lacking(name, device, forecast, cluster) for name in members), default=0)
        if lacking <= 0:
            return device
        needed = needed_bytes(first.of(device.name), device)
        room = min(device.memory_bytes, needed) - lacking
        return replace(device, memory_bytes=max(1, room))

    found = tuple(map(less, costs.cluster.devices))
    return replace(costs, cluster=replace(costs.cluster, devices=found))


def _lacking(name: str, first: Device, forecast: Forecast, cluster: Cluster) -> int:
    """Return what a rank lacks, in bytes of the first one, who has other parts of tensors."""
    device, entry = cluster.device[name], forecast.of(name)
    lacking = needed_bytes(entry, device) - device.memory_bytes
    parts = forecast.of(first.name).peak_bytes / max(1, entry.peak_bytes)
    return int(lacking * parts) + 1 if lacking > 0 else 0
