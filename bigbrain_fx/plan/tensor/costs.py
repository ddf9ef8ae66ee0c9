"""Costs of a group: each op takes what its slowest member takes, an exchange what its links take.

Members wait for each other at every exchange; to count each op at its slowest member is that, or a
little more. This file knows ops and links; it knows no stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Costs, Graph, Op, OpCost, TensorParallel
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import lengths
from bigbrain_fx.plan.tensor.groups import Groups, column
from bigbrain_fx.planning import crowded

SPACE = "shard."
BACKWARD = ("shard.copy_to_group", "shard.split")
"""Exchanges that send in the backward pass, and nothing forward."""
LARGE = 1 << 14  # numbers; `runtime.group` has it, too
_TOUCHES = 3.0  # adding a tensor to another moves its bytes three times


def column_costs(
    members: Sequence[Graph],
    tensor: TensorParallel,
    cluster: Cluster,
    source: Source,
    estimator: str,
) -> tuple[Costs, ...]:
    """Return what the ops of each member's graph cost on its own devices.

    Args:
        members: concrete graphs, for the rows of a micro-batch.
        tensor: the groups of devices, and what they divide.
        cluster: has them.
        source: the optimizer's part.
        estimator: by name.
    """
    groups = tensor.groups
    busy = crowded(cluster)  # members compute at the same time
    alike = twins(tensor)
    own = {first: estimated(members[first], busy, source, estimator) for first in set(alike)}
    each = [own[first] for first in alike]
    return tuple(
        replace(
            costs,
            cluster=column(busy, groups, member),
            ops=_groups(members[member], each, busy, groups, member),
            optimizer_s_per_byte=_of(costs.optimizer_s_per_byte, groups, member),
            optimizer_s_per_tensor=_of(costs.optimizer_s_per_tensor, groups, member),
            measured={d: ops for d, ops in costs.measured.items() if d in _column(groups, member)},
            alone=None,
        )
        for member, costs in enumerate(each)
    )


def twins(tensor: TensorParallel) -> tuple[int, ...]:
    """Return for each member the first that has as much of every axis: their costs are equal."""
    sizes = {axis.size for axis in tensor.axes}
    every = list(zip(*(lengths(size, tensor.shares) for size in sorted(sizes)), strict=True))
    every = every or [()] * tensor.members
    return tuple(every.index(own) for own in every)


def _column(groups: Sequence[Sequence[str]], member: int) -> set[str]:
    return {group[member] for group in groups}


def _of(
    by_device: Mapping[str, float], groups: Sequence[Sequence[str]], member: int
) -> dict[str, float]:
    return {d: s for d, s in by_device.items() if d in _column(groups, member)}


def _groups(
    graph: Graph, each: Sequence[Costs], cluster: Cluster, groups: Groups, member: int
) -> dict[str, Mapping[str, OpCost]]:
    """Return the costs of one member's ops by its device in each group; alike groups have one."""
    tables: dict[object, Mapping[str, OpCost]] = {}
    found = {}
    for group in groups:
        pairs = zip(each, group, strict=True)
        key = tuple(id(own.ops[device]) for own, device in pairs), _ways(cluster, group)
        if key not in tables:
            tables[key] = _group(graph, each, cluster, group, member)
        found[group[member]] = tables[key]
    return found


def _ways(cluster: Cluster, group: Sequence[str]) -> tuple[object, ...]:
    """Return all that exchanges of a group depend on."""
    ends = (replace(cluster.device[name], name="", host="") for name in group)
    links = (cluster.link(a, b) for a in group for b in group if a != b)
    return (*ends, *links)


def _group(
    graph: Graph, each: Sequence[Costs], cluster: Cluster, group: Sequence[str], member: int
) -> dict[str, OpCost]:
    """Return the costs of one member's ops in a group."""
    found = {}
    for op in graph.ops:
        costs = [own.op_cost(op.name, device) for own, device in zip(each, group, strict=True)]
        own = replace(
            costs[member],
            forward_s=max(cost.forward_s for cost in costs),
            backward_s=max(cost.backward_s for cost in costs),
            backward_input_s=max(cost.backward_input_s for cost in costs),
        )
        found[op.name] = _exchanged(op, own, cluster, group) if op.target.startswith(SPACE) else own
    return found


def _exchanged(op: Op, cost: OpCost, cluster: Cluster, group: Sequence[str]) -> OpCost:
    """Return what an exchange takes: its messages, and adding up what they bring."""
    taken_s = exchange_s(op, cluster, group)
    if op.target not in BACKWARD:
        return replace(cost, forward_s=taken_s, backward_s=0.0, backward_input_s=0.0)
    backward_s = taken_s if op.requires_grad else 0.0
    return replace(cost, forward_s=0.0, backward_s=backward_s, backward_input_s=backward_s)


def pieces(numel: int, members: int) -> tuple[int, ...]:
    """Return how many numbers of a sum each member adds; one entry where each adds all of it."""
    if members == 2 or numel < LARGE:
        return (numel,)
    return tuple(numel // members + (member < numel % members) for member in range(members))


def sent_share(kind: str, numel: int, members: int) -> float:
    """Return the share of a whole tensor that a member sends each other one in an exchange."""
    if kind in ("all_gather", "split"):
        return 1 / members
    return 2 / members if len(pieces(numel, members)) > 1 else 1.0


def exchange_s(op: Op, cluster: Cluster, group: Sequence[str]) -> float:
    """Return the seconds of one exchange: every member sends to every other."""
    spec, members = op.outputs[0], len(group)
    if op.target == "shard.all_gather":
        return _slowest_s(cluster, group, spec.nbytes // members)
    if op.target == "shard.split" or len(pieces(spec.numel, members)) == 1:
        return _slowest_s(cluster, group, spec.nbytes)
    piece = -(-spec.nbytes // members)
    return _slowest_s(cluster, group, piece) + _slowest_s(cluster, group, piece, adds=False)


def _slowest_s(cluster: Cluster, group: Sequence[str], nbytes: int, *, adds: bool = True) -> float:
    """Return the seconds in which each member sends each other one so many bytes."""
    return max(_member_s(cluster, group, name, nbytes, adds=adds) for name in group)


def _member_s(
    cluster: Cluster, group: Sequence[str], name: str, nbytes: int, *, adds: bool
) -> float:
    others = len(group) - 1
    links = [cluster.link(other, name) for other in group if other != name]
    device = cluster.device[name]
    wire_s = sum(nbytes / link.bytes_per_s for link in links)
    latency_s = max(link.latency_s for link in links)
    handling_s = 2 * others * device.overheads.handling_s(nbytes)
    adding_s = adds * others * _TOUCHES * nbytes / device.memory_bytes_per_s
    return latency_s + wire_s + handling_s + adding_s
