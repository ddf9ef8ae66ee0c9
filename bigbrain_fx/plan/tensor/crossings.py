"""One column's stages -> the values that cross between groups in parts, where that is faster.

Whole messages of T ranks take the link, or the hosts' NICs, T times as long as their parts. The
group that reads them joins the parts. This file knows stages and links; `shard.parted` carries out
its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from bigbrain_fx.core import (
    Cluster,
    Crossed,
    Edge,
    Graph,
    OptimizerStep,
    Placement,
    Program,
    Recv,
    Send,
    Stages,
    TensorParallel,
    TensorSpec,
)
from bigbrain_fx.plan.cut import norms_spec, owners
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.shard import again_name, divisible, lengths, own_name, part_dim, with_parts
from bigbrain_fx.plan.tensor.messages import LARGE, exchange_s
from bigbrain_fx.weights import part_name


def crossings(
    whole: Graph, graph: Graph, stages: Stages, tensor: TensorParallel, cluster: Cluster
) -> tuple[Crossed, ...]:
    """Return what crosses in parts.

    Args:
        whole: as captured, in numbers.
        graph: of the first rank, in numbers.
        stages: of its column.
        tensor: the groups.
        cluster: all their devices.
    """
    group_of = {group[0]: group for group in tensor.groups}
    homes = _homes(stages)
    values = dict.fromkeys(e.value for e in stages.edges if e.kind == "activation")
    found = []
    for value in values:
        if value not in graph.op or not divisible(graph, whole, value, tensor.members):
            continue
        if graph.op[value].outputs[0].numel < LARGE or len(homes.get(value, ())) != 1:
            continue
        (home,) = homes[value]
        readers = _readers(graph, homes, value, home)
        each = Crossed(value, tuple(readers.values()))
        about = group_of[home], [group_of[device] for device in readers]
        if readers and _is_faster(graph, each, tensor, cluster, *about):
            found.append(each)
    return tuple(found)


def _homes(stages: Stages) -> Mapping[str, tuple[str, ...]]:
    """Return the devices of each op of one replica; copies of an op are several, or none."""
    found: dict[str, tuple[str, ...]] = {}
    for stage in stages.of_replica(0):
        for name in stage.ops:
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), stage.device)))
    copied = {name for stage in stages.stages for name in stage.recomputed}
    return {name: () if name in copied else devices for name, devices in found.items()}


def _readers(
    graph: Graph, homes: Mapping[str, tuple[str, ...]], value: str, home: str
) -> dict[str, tuple[str, ...]]:
    """Return a value's readers on other devices; nothing where one of them is copied."""
    found: dict[str, tuple[str, ...]] = {}
    for reader in graph.consumers[value]:
        devices = homes.get(reader)
        if devices is None:
            continue  # it is never run
        if len(devices) != 1:
            return {}
        if devices[0] != home:
            found[devices[0]] = (*found.get(devices[0], ()), reader)
    return found


def _is_faster(
    graph: Graph,
    each: Crossed,
    tensor: TensorParallel,
    cluster: Cluster,
    home: Sequence[str],
    groups: Sequence[Sequence[str]],
) -> bool:
    """Whether parts, and putting them together, take less than wholes do."""
    nbytes, members = graph.op[each.value].outputs[0].nbytes, tensor.members
    sizes = {each.value: lengths_of(graph, each, tensor)}
    added = with_parts(graph, (each,), 0, sizes)
    whole_s = parts_s = 0.0
    for number, (source, target) in enumerate(pairwise((home, *groups))):
        whole_s += _sent_s(cluster, source, target, nbytes)
        parts_s += _sent_s(cluster, source, target, nbytes // members)
        op = added.op[again_name(each.value, number)]
        parts_s += exchange_s(op, cluster, target, backward=False)
    return parts_s < whole_s


def _sent_s(cluster: Cluster, source: Sequence[str], target: Sequence[str], nbytes: int) -> float:
    """Return the seconds until all ranks of a group have sent theirs to those of another."""
    pairs = list(zip(source, target, strict=True))
    alone_s = max(cluster.link(a, b).transfer_s(nbytes) for a, b in pairs)
    taken: dict[str, float] = {}
    for a, b in pairs:
        for nic, rate in cluster.nics(a, b):
            taken[nic] = taken.get(nic, 0.0) + nbytes / rate
    return max(alone_s, *taken.values()) if taken else alone_s


def lengths_of(graph: Graph, each: Crossed, tensor: TensorParallel) -> tuple[int, ...]:
    """Return what each rank has of a value."""
    spec = graph.op[each.value].outputs[0]
    dim = part_dim(spec, tensor.members)
    assert dim is not None
    return lengths(int(spec.shape[dim]), tensor.shares)


def placed_parts(placement: Placement, crossed: Sequence[Crossed]) -> Placement:
    """Return a placement of the graph with parts: each is where its value is made, or read."""
    replicas = tuple(
        replace(each, device_of=dict(_placed(each.device_of, crossed)))
        for each in placement.replicas
    )
    return replace(
        placement, device_of=dict(_placed(placement.device_of, crossed)), replicas=replicas
    )


def _placed(device_of: Mapping[str, str], crossed: Sequence[Crossed]) -> Iterator[tuple[str, str]]:
    yield from device_of.items()
    for each in crossed:
        yield own_name(each.value), device_of[each.value]
        for number, readers in enumerate(each.readers):
            yield again_name(each.value, number), device_of[readers[0]]


# ------------------------------------------------------------------------------------------------
# Who answers for which gradient where norms are exchanged: of parts, every rank for its own.
#
#   d0  embed.weight, norm.weight       what is whole, the first rank; and its own parts
#   d1  embed.weight[1]                 its parts


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
