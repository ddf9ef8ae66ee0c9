"""Costs of a group: what each op adds to the time of the rank that is last.

Each rank has a clock, and goes on from an exchange when the others' messages are there. The last
rank waits for none. This file knows ops and ranks; it knows no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from bigbrain_fx.core import (
    Axis,
    Cluster,
    Costs,
    Device,
    Exchange,
    Graph,
    Op,
    OpCost,
    TensorParallel,
)
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import lengths
from bigbrain_fx.plan.tensor.groups import Groups, column, seen_by
from bigbrain_fx.plan.tensor.messages import (
    SPACE,
    exchanged_s,
    sends_backward,
    sends_forward,
    sent_share,
    sum_s,
    waits,
)
from bigbrain_fx.planning import bytes_per_s, crowded, nameless

Seconds = Callable[[OpCost], float]
_TOUCHES = 3  # a sum reads two tensors and writes one


def column_costs(
    members: Sequence[Graph],
    tensor: TensorParallel,
    cluster: Cluster,
    source: Source,
    estimator: str,
) -> tuple[Costs, ...]:
    """Return what the ops of each rank's graph cost on its own devices.

    Args:
        members: concrete graphs, for the rows of a micro-batch.
        tensor: the groups of devices, and what they divide.
        cluster: has them.
        source: the optimizer's part.
        estimator: by name.
    """
    groups = tensor.groups
    busy = crowded(cluster)  # ranks compute at the same time
    alike = twins(tensor)
    count = len(members)
    own = {first: estimated(members[first], busy, source, estimator, count) for first in set(alike)}
    each = [own[first] for first in alike]
    prices = _Prices(members, each, alike, busy, groups)
    return tuple(
        replace(
            costs,
            cluster=column(busy, groups, member),
            ops=prices.of_column(member),
            optimizer_s_per_byte=_of(costs.optimizer_s_per_byte, groups, member),
            optimizer_s_per_tensor=_of(costs.optimizer_s_per_tensor, groups, member),
            measured={d: ops for d, ops in costs.measured.items() if d in _column(groups, member)},
            scaled={d: key for d, key in costs.scaled.items() if d in _column(groups, member)},
            alone=None,
        )
        for member, costs in enumerate(each)
    )


def twins(tensor: TensorParallel) -> tuple[int, ...]:
    """Return for each rank the first that has as much of every axis: their costs are equal."""
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


class _Prices:
    """Times of ops in each group; mutable: identical groups, and identical ranks, share a table."""

    def __init__(
        self,
        members: Sequence[Graph],
        each: Sequence[Costs],
        alike: Sequence[int],
        cluster: Cluster,
        groups: Groups,
    ) -> None:
        self.members, self.each, self.alike = members, each, alike
        self.cluster, self.groups = cluster, groups
        self._kinds = [self._kind(group) for group in groups]
        self._tables: dict[object, Mapping[str, OpCost]] = {}

    def of_column(self, member: int) -> dict[str, Mapping[str, OpCost]]:
        """Return the costs of one rank's ops by its device in each group."""
        return {
            group[member]: self._table(number, member) for number, group in enumerate(self.groups)
        }

    def _kind(self, group: Sequence[str]) -> tuple[object, ...]:
        pairs = zip(self.each, group, strict=True)
        seen = seen_by(self.cluster, self.groups, group)
        return tuple(id(own.ops[device]) for own, device in pairs), _ways(seen, group)

    def _table(self, number: int, member: int) -> Mapping[str, OpCost]:
        group, first = self.groups[number], self.alike[member]
        own = self.each[member].ops[group[member]]
        key = self._kinds[number], first, id(own)
        if key not in self._tables:
            seen = seen_by(self.cluster, self.groups, group)
            self._tables[key] = _group(self.members[first], self.each, seen, group, member)
        return self._tables[key]


def _ways(cluster: Cluster, group: Sequence[str]) -> tuple[object, ...]:
    """Return all that exchanges of a group depend on."""
    ends = (nameless(cluster.device[name]) for name in group)
    pairs = [(a, b) for a in group for b in group if a != b]
    links = (cluster.link(a, b) for a, b in pairs)
    return (*ends, *links, *(_nics(cluster, pairs) if cluster.has_shared_nics else ()))


def _nics(
    cluster: Cluster, pairs: Iterable[tuple[str, str]]
) -> Iterator[tuple[tuple[int, float], ...]]:
    """Yield the NICs that each pair's messages pass: by number, since other groups have others."""
    number: dict[str, int] = {}
    for a, b in pairs:
        passed = cluster.nics(a, b)
        yield tuple((number.setdefault(name, len(number)), rate) for name, rate in passed)


def _group(
    graph: Graph, each: Sequence[Costs], cluster: Cluster, group: Sequence[str], member: int
) -> dict[str, OpCost]:
    """Return the costs of one rank's ops in a group.

    Gradients that wait for the end of a backward go in one message; it is counted once, over all.
    Exchanges that were measured with their layer cost what was measured.
    """
    known = frozenset(each[0].measured.get(group[0], ()))
    about = each, cluster, group, known
    late = [op for op in graph.ops if waits(graph, op) and sends_backward(op)]
    late = [op for op in late if op.name not in known]
    late_s = sum_s(sum(op.outputs[0].nbytes for op in late), cluster, group) if late else 0.0
    waiting_s = dict.fromkeys((op.name for op in late), late_s / max(1, len(late)))
    forward_s = _added_s(graph, attrgetter("forward_s"), *about)
    backward_s = _added_s(graph, attrgetter("backward_s"), *about, waiting_s=waiting_s)
    input_s = _added_s(graph, attrgetter("backward_input_s"), *about, waiting_s=waiting_s)
    return {
        op.name: replace(
            each[member].op_cost(op.name, group[member]),
            forward_s=forward_s[op.name],
            backward_s=backward_s[op.name],
            backward_input_s=min(input_s[op.name], backward_s[op.name]),
        )
        for op in graph.ops
    }


def _added_s(
    graph: Graph,
    seconds: Seconds,
    each: Sequence[Costs],
    cluster: Cluster,
    group: Sequence[str],
    known: frozenset[str],
    *,
    waiting_s: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return by how much each op puts off the last rank, in a pass that all begin at once.

    `waiting_s` are those of a backward pass.
    """
    backward = waiting_s is not None
    sends = sends_backward if backward else sends_forward
    clocks_s, last_s, found = [0.0] * len(group), 0.0, {}
    for op in reversed(graph.ops) if backward else graph.ops:
        exchanges = op.target.startswith(SPACE) and op.name not in known
        if exchanges:
            added_s = [_joined_s(graph, op, cluster.device[d]) if backward else 0.0 for d in group]
        else:
            pairs = zip(each, group, strict=True)
            added_s = [seconds(own.op_cost(op.name, device)) for own, device in pairs]
        clocks_s = [s + own_s for s, own_s in zip(clocks_s, added_s, strict=True)]
        if waiting_s and op.name in waiting_s:
            clocks_s = [max(clocks_s) + waiting_s[op.name]] * len(clocks_s)
        elif exchanges and sends(op):
            clocks_s = exchanged_s(op, cluster, group, clocks_s, backward=backward)
        found[op.name], last_s = max(clocks_s) - last_s, max(clocks_s)
    return found


def _joined_s(graph: Graph, op: Op, device: Device) -> float:
    """Return the seconds to add up the gradients of what an exchange gave to several readers.

    Estimators count this for the ops of a graph; exchanges are none of theirs.
    """
    back = sum(graph.op[reader].requires_grad for reader in graph.consumers[op.name])
    each_s = _TOUCHES * op.outputs[0].nbytes / device.memory_bytes_per_s + device.launch_s
    return max(0, back - 1) * each_s


# ------------------------------------------------------------------------------------------------
# Graph, axes, groups -> about the least that a micro-batch can take each of them.
#
# Nothing is cut or simulated: this says what is worth planning, and in which order. Work that is
# divided goes at the speed of all ranks together, the rest at that of the slowest; exchanges
# take what their links take.


@dataclass(frozen=True)
class Prices:
    """Times of a micro-batch's ops on each device.

    Attributes:
        costs: of all ops, where no device slows another.
        cluster: with the links.
    """

    costs: Costs
    cluster: Cluster

    def speeds(self) -> dict[str, float]:
        """Return how often a second each device could do all of the model's work."""
        return {name: 1 / max(whole_s, 1e-12) for name, whole_s in self._all_s.items()}

    def until_s(self, device: str) -> Sequence[float]:
        """Return the seconds of all ops before each place of their line on a device."""
        return [0.0, *accumulate(self._seconds[device].values())]

    def least_s(self, axes: Sequence[Axis], groups: Sequence[Sequence[str]]) -> list[float]:
        """Return about the least that a micro-batch takes each group, which divides these axes."""
        divided = {name for axis in axes for name in (*axis.along, *axis.summed)}
        sent = {(e.kind, e.value): e for axis in axes for e in axis.exchanges}
        kinds = [*map(self._kind, groups)]
        first = dict(zip(reversed(kinds), reversed(groups), strict=True))  # hundreds are of few
        each_s = {kind: self._group_s(own, divided, sent.values()) for kind, own in first.items()}
        return [max(each_s[kind], 1e-12) for kind in kinds]

    def _kind(self, group: Sequence[str]) -> tuple[object, ...]:
        """Return all that a group's seconds depend on."""
        rates = (bytes_per_s(self.cluster, group[0], other) for other in group[1:])
        return (*(id(self._seconds[name]) for name in group), *rates)

    def _group_s(self, group: Sequence[str], divided: set[str], sent: Iterable[Exchange]) -> float:
        """Return the seconds of all ops on one group alone."""
        parts = [self._work_s(name, divided) for name in group]
        together_s = 1 / sum(1 / max(seconds, 1e-12) for seconds in parts)
        rest_s = max(self._all_s[name] - part for name, part in zip(group, parts, strict=True))
        return together_s + rest_s + sum(self._exchange_s(group, each) for each in sent)

    def _exchange_s(self, group: Sequence[str], each: Exchange) -> float:
        nbytes = each.nbytes * sent_share(each.kind, each.nbytes // 4, len(group))
        rate = min(bytes_per_s(self.cluster, group[0], other) for other in group[1:])
        return (len(group) - 1) * nbytes / rate

    def _work_s(self, device: str, ops: Iterable[str]) -> float:
        each = self._seconds[device]
        return sum(each[name] for name in ops)

    @cached_property
    def _all_s(self) -> dict[str, float]:
        sums = {id(each): sum(each.values()) for each in self._seconds.values()}
        return {name: sums[id(each)] for name, each in self._seconds.items()}

    @cached_property
    def _seconds(self) -> dict[str, dict[str, float]]:
        """Device -> op -> seconds forward and back; devices of one kind share a table."""
        tables: dict[int, dict[str, float]] = {}
        found = {}
        for device, ops in self.costs.ops.items():
            if id(ops) not in tables:
                each = ops.items()
                tables[id(ops)] = {n: cost.forward_s + cost.backward_s for n, cost in each}
            found[device] = tables[id(ops)]
        return found
