"""Costs of a group: what each op adds to the time of the member that is last.

Members have a clock each, and go on from an exchange when what the others sent is there: who is
behind all the others waits for none. This file knows ops and members; it knows no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from bigbrain_fx.core import Cluster, Costs, Graph, Op, OpCost, TensorParallel
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import lengths
from bigbrain_fx.plan.tensor.exchange import BACKWARD, SPACE, exchanged_s
from bigbrain_fx.plan.tensor.groups import Groups, column
from bigbrain_fx.planning import crowded

Seconds = Callable[[OpCost], float]


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
    about = each, cluster, group
    forward_s = _added_s(graph.ops, attrgetter("forward_s"), _sends_forward, *about)
    back = tuple(reversed(graph.ops))
    backward_s = _added_s(back, attrgetter("backward_s"), _sends_backward, *about)
    input_s = _added_s(back, attrgetter("backward_input_s"), _sends_backward, *about)
    return {
        op.name: replace(
            each[member].op_cost(op.name, group[member]),
            forward_s=forward_s[op.name],
            backward_s=backward_s[op.name],
            backward_input_s=min(input_s[op.name], backward_s[op.name]),
        )
        for op in graph.ops
    }


def _sends_forward(op: Op) -> bool:
    return op.target not in BACKWARD


def _sends_backward(op: Op) -> bool:
    return op.target in BACKWARD and op.requires_grad


def _added_s(
    ops: Iterable[Op],
    seconds: Seconds,
    sends: Callable[[Op], bool],
    each: Sequence[Costs],
    cluster: Cluster,
    group: Sequence[str],
) -> dict[str, float]:
    """Return by how much each op puts off the last member, in a pass that all begin at once."""
    clocks_s, last_s, found = [0.0] * len(group), 0.0, {}
    for op in ops:
        if not op.target.startswith(SPACE):
            pairs = zip(clocks_s, each, group, strict=True)
            clocks_s = [s + seconds(own.op_cost(op.name, name)) for s, own, name in pairs]
        elif sends(op):
            clocks_s = exchanged_s(op, cluster, group, clocks_s)
        found[op.name], last_s = max(clocks_s) - last_s, max(clocks_s)
    return found
