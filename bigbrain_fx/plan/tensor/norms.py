"""Who answers for which gradient where norms are exchanged: of parts, every member for its own.

    d0  embed.weight, norm.weight       what is whole, the first member; and its own parts
    d1  embed.weight[1]                 its parts

This file knows parameters and devices; it knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Edge, OptimizerStep, Program, Recv, Send, TensorSpec
from bigbrain_fx.plan.cut import norms_spec, owners
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.weights import part_name


def answering(plan: Plan) -> dict[str, str]:
    """Return the device that answers for each trained parameter, or part, in the model's order."""
    owned = owners(plan.sharded.members[0], plan.stages)
    device_of = {name: device for device, names in owned.items() for name in names}
    parts = {(shard.param, shard.member) for shard in plan.sharded.shards}
    found: dict[str, str] = {}
    for param in plan.graph.params:
        if param.name in device_of:
            found[param.name] = device_of[param.name]
            for member in range(1, plan.stages.members):
                if (param.name, member) in parts:
                    found[part_name(param.name, member)] = _twin(plan, found[param.name], member)
    return found


def _twin(plan: Plan, device: str, member: int) -> str:
    stage = plan.stages.of(device)[0]
    return plan.stages.group_of(stage)[member].device


def norm_specs(plan: Plan) -> dict[str, TensorSpec]:
    """Return what each device's message of norms is."""
    owned: dict[str, list[str]] = {}
    for name, device in answering(plan).items():
        plain = name if name in plan.graph.param else name.rpartition("[")[0]
        owned.setdefault(device, []).append(plain)
    return {device: norms_spec(plan.graph, names) for device, names in owned.items()}


def with_norms(plan: Plan) -> Plan:
    """Let all devices of a plan with groups exchange norms, before each steps."""
    edges = tuple(_edges(plan))
    stages = replace(plan.stages, edges=(*plan.stages.edges, *edges))
    of = {stage.index: stage.device for stage in stages.stages}
    programs = []
    for program in plan.programs:
        sent = [Send(e, None) for e in edges if of[e.source] == program.device]
        received = [Recv(e, None) for e in edges if of[e.target] == program.device]
        place = next(
            i for i, each in enumerate(program.instructions) if isinstance(each, OptimizerStep)
        )
        before, after = program.instructions[:place], program.instructions[place:]
        programs.append(Program(program.device, (*before, *sent, *received, *after)))
    return replace(plan, stages=stages, programs=tuple(programs))


def _edges(plan: Plan) -> Iterator[Edge]:
    specs = norm_specs(plan)
    first_on = {stage.device: stage.index for stage in reversed(plan.stages.stages)}
    for a, spec in sorted(specs.items(), key=lambda entry: first_on[entry[0]]):
        for b in plan.stages.devices:
            if a != b:
                yield Edge("norms", first_on[a], first_on[b], "norm", spec.nbytes)
