"""Columns: a member of each group has stages and programs like a pipeline's of its own.

    member 0   [0] -> [1]      stages of member m come after those of m-1, in the same order;
                |      |       what members send each other is inside the stages
    member 1   [2] -> [3]

All members run one order of instructions: exchanges meet. This file knows stages and programs; it
knows no costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import (
    Compute,
    Edge,
    Graph,
    Instruction,
    Placement,
    Program,
    Recv,
    Send,
    Stages,
)
from bigbrain_fx.plan.cut import cut


def cut_columns(
    members: Sequence[Graph], groups: Sequence[Sequence[str]], placement: Placement, rows: int
) -> tuple[Stages, ...]:
    """Cut each member's graph as the first one's is cut.

    Args:
        members: their graphs.
        groups: of devices; `placement` names the first of each.
        placement: of the first member's ops.
        rows: of a micro-batch.
    """
    first = cut(members[0], placement, rows, breaks=placement.breaks)
    device_of = {name: s.device for s in first.stages for name in s.ops if name not in s.recomputed}
    device_of = {**placement.device_of, **device_of}  # ops that were moved stay with the others
    columns = [first]
    for member, graph in enumerate(members[1:], start=1):
        to = {group[0]: group[member] for group in groups}
        homes = {name: to[device] for name, device in device_of.items()}
        columns.append(cut(graph, Placement(homes), rows, breaks=placement.breaks))
        _require_same(first, columns[-1])
    return tuple(columns)


def _require_same(first: Stages, other: Stages) -> None:
    same = [stage.ops for stage in first.stages] == [stage.ops for stage in other.stages]
    if not same or list(map(_way, first.edges)) != list(map(_way, other.edges)):
        raise AssertionError("members of a group have other stages: their graphs differ in numbers")


def _way(edge: Edge) -> tuple[object, ...]:
    return edge.kind, edge.value, edge.source, edge.target


def joined_columns(columns: Sequence[Stages]) -> Stages:
    """Return the stages of all members as one list."""
    count = len(columns[0].stages)
    return Stages(
        tuple(
            replace(stage, index=stage.index + member * count, member=member)
            for member, column in enumerate(columns)
            for stage in column.stages
        ),
        tuple(
            replace(edge, source=edge.source + member * count, target=edge.target + member * count)
            for member, column in enumerate(columns)
            for edge in column.edges
        ),
        columns[0].moved,
    )


def part_of(stages: Stages, member: int) -> Stages:
    """Return one member's stages and edges, with the numbers that they have among all.

    Norms, which all devices exchange, are left out.
    """
    own = stages.of_member(member)
    held = {stage.index for stage in own}
    edges = (edge for edge in stages.edges if {edge.source, edge.target} <= held)
    return Stages(own, tuple(edge for edge in edges if edge.kind != "norm"), stages.moved)


def column_of(stages: Stages, member: int) -> Stages:
    """Return one member's stages and edges, numbered from 0."""
    part = part_of(stages, member)
    first = part.stages[0].index
    return Stages(
        tuple(replace(stage, index=stage.index - first, member=0) for stage in part.stages),
        tuple(
            replace(edge, source=edge.source - first, target=edge.target - first)
            for edge in part.edges
        ),
        stages.moved,
    )


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
        return replace(instruction, edge=edges[instruction.edge])
    if isinstance(instruction, Compute):
        return replace(instruction, stage=numbers[instruction.stage])
    return instruction
