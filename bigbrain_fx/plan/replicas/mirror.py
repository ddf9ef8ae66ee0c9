"""`--schedule gems` -> one plan: a chain of devices, cut once, and run by two replicas in reverse.

    replica 0   d0 d1 d2 d3      micro-batches 0 2 4 ...      of several groups of devices all are
    replica 1   d3 d2 d1 d0      micro-batches 1 3 5 ...      cut like the first

The module knows placements and chains; `schedule.gems` has the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bigbrain_fx.core import Cluster, Graph, Placement, Replica
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import fastest, fastest_number
from bigbrain_fx.plan.fold import micro_option
from bigbrain_fx.plan.judge import PipelineMaker
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.one import counts, estimated, more_counts, placement_of, planned_as
from bigbrain_fx.plan.replica_cut import cut_replicas
from bigbrain_fx.plan.replicas.divide import Group, divide, likeness, numbered, only
from bigbrain_fx.plan.schedule import Gems
from bigbrain_fx.planning import label, options_of

FLAG = f"--schedule {Gems.name}"
_ALL: Mapping[str, object] = {"use_all": True}
_ALONE: Mapping[str, object] = {**_ALL, "in_flight": 1}
_ROOMY = 1000.0
CUTS = ((_ALL, _ROOMY), (_ALONE, 1.0), (_ALONE, 0.75), (_ALONE, 0.5))
"""What a partitioner is told, where it knows such an option, and of how much memory. No device is
left out, since a forward is hidden on all but one; a 1F1B's cut is even, and where that does not
fit one micro-batch is held, beside messages of two replicas, of which it knows one's."""
LEVEL = (_ALONE, 0.0)
"""Of devices of different memory: each holds what another does, so none is taken for larger."""


def wants_mirror(options: Options) -> bool:
    """Whether two replicas shall share devices."""
    return options.schedule == Gems.name


def plan_mirrored(maker: PipelineMaker) -> Plan:
    """Plan replicas that share devices two by two: of one group, or of so many as replicas.

    Raises:
        NoPlanError: it does not fit in memory.
        InputError: the partitioner makes no chain of an even number of devices, the groups
            differ, or no number of micro-batches suits.
    """
    cluster, options = maker.cluster, maker.options
    groups = divide(cluster, options.replicas or len(cluster.replicas) or 1)
    _require_alike(cluster, groups)
    mirrored = _Mirrored(maker, groups)
    is_level = len({device.memory_bytes for device in cluster.devices}) == 1
    cuts = CUTS if is_level else (*CUTS, LEVEL)
    turns = 2 * len(groups)
    usual = _micro_batches(maker.graph, cluster, options, turns)
    further = more_counts(maker.graph, options, max(usual))

    def make(count: int) -> Plan:
        tries = (partial(mirrored.plan, count, told, room) for told, room in cuts)
        return fastest(tries, but=(NoPlanError,))

    more = (count for count in further if count % turns == 0)
    return fastest_number(usual, more, make, but=(NoPlanError,))


def _require_alike(cluster: Cluster, groups: Sequence[Group]) -> None:
    if len({likeness(only(cluster, group)) for group in groups}) > 1:
        raise InputError(
            f"{FLAG} cuts {len(groups)} groups of devices alike, and these are unlike: "
            f"{', '.join('+'.join(group) for group in groups)}",
            code="BX1286",
            at="--replicas",
            help="leave --replicas out"
            + (_BY_NAME if _could_be_alike(cluster, len(groups)) else ""),
        )


_BY_NAME = ', or name groups that are alike under "replicas" in the cluster file'


def _could_be_alike(cluster: Cluster, count: int) -> bool:
    """Return whether so many groups alike can be made, of two devices each or more."""
    kinds = Counter(likeness(only(cluster, (device.name,))) for device in cluster.devices)
    return sum(devices // count for devices in kinds.values()) >= 2


def _micro_batches(graph: Graph, cluster: Cluster, options: Options, turns: int) -> list[int]:
    """Return the numbers of micro-batches to try: each replica has as many."""
    tried = counts(graph, cluster, options)
    found = [count for count in tried if count % turns == 0]
    if not found:
        fitting = [n for n in range(turns, graph.batch + 1, turns) if graph.batch % n == 0]
        raise InputError(
            f"{FLAG} takes micro-batches of {turns} replicas in turn, and {turns} does not divide "
            f"{' or '.join(map(str, tried))}",
            code="BX1287",
            at="--micro-batches",
            help=f"use {micro_option(fitting)}"
            if fitting
            else f"let example_batch() have a number of rows that {turns} divides",
        )
    return found


@dataclass(frozen=True)
class _Mirrored:
    """Plans of replicas that share devices, of one model on groups of devices alike."""

    maker: PipelineMaker
    groups: Sequence[Group]

    def plan(self, micro_batches: int, told: Mapping[str, object], room: float) -> Plan:
        """Plan so many micro-batches.

        Args:
            micro_batches: of a step.
            told: to the partitioner, where it has such options.
            room: the share of its memory that a device has for one replica, weights counted twice;
                0: half of what the least of them has.
        """
        graph, options = self.maker.graph, self.maker.options
        rows, alone = graph.batch // micro_batches, only(self.maker.cluster, self.groups[0])
        costs = estimated(graph.at(rows), alone, self.maker.source, options.estimator)
        seen = replace(costs, cluster=_with_room(costs.cluster, room))
        asked = _told(options, told)
        plan = planned_as(
            lambda: placement_of(_with_twice(graph), alone, asked, micro_batches, seen),
            partial(self._both, micro_batches),
        )
        return replace(plan, partitioner=label(options.partitioner))

    def _both(self, micro_batches: int, found: Placement) -> Plan:
        """Plan both replicas of what a partitioner has placed."""
        graph, options = self.maker.graph, self.maker.options
        rows = graph.batch // micro_batches
        replicas = self._replicas(found, _line_of(graph, found, rows), micro_batches)
        first, order = replicas[0].device_of, options.all_reduce_order
        reason = f"replica 0 alone: {found.reason}" if found.reason else ""
        placement = Placement(first, reason, replicas, sum_order=order)
        whole = self.maker.estimated(rows)
        return self.maker.placed(options, micro_batches, placement, whole)

    def _replicas(
        self, found: Placement, line: Sequence[str], micro_batches: int
    ) -> tuple[Replica, ...]:
        """Return two replicas of each group, with micro-batches in turn."""
        count = 2 * len(self.groups)
        micros = numbered([micro_batches // count] * count, in_turn=True)
        clusters = [only(self.maker.cluster, group) for group in self.groups]
        ways = [to for each in clusters for to in _both_ways(line, clusters[0], each)]
        return tuple(
            Replica({op: to.get(at, to[line[0]]) for op, at in found.device_of.items()}, own)
            for to, own in zip(ways, micros, strict=True)
        )


def _with_room(cluster: Cluster, share: float) -> Cluster:
    """Return a cluster whose devices have another memory."""
    level = min(device.memory_bytes for device in cluster.devices) // 2
    devices = (
        replace(d, memory_bytes=int(share * d.memory_bytes) or level) for d in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def _with_twice(graph: Graph) -> Graph:
    """Return a graph whose weights take twice the room."""

    def twice(shape: tuple[object, ...], strides: tuple[object, ...]) -> Mapping[str, object]:
        return {"shape": (2, *shape), "strides": (0, *strides)}

    params = (
        replace(p, spec=replace(p.spec, **twice(p.spec.shape, p.spec.strides)))  # type: ignore[arg-type]  # fields of TensorSpec
        for p in graph.params
    )
    return replace(graph, params=tuple(params))


def _told(options: Options, told: Mapping[str, object]) -> Options:
    """Return options that tell a partitioner what it can be told, unless the user did."""
    known = options_of("partitioner", options.partitioner)
    given = dict(options.partitioner_options)
    more = {name: value for name, value in told.items() if name in known and name not in given}
    both = tuple({**given, **more}.items())
    return replace(options, partitioner_options=both, replicas=None)  # type: ignore[arg-type]  # choices of a partitioner


def _line_of(graph: Graph, placement: Placement, rows: int) -> tuple[str, ...]:
    """Return the devices of a line, in order.

    Raises:
        InputError: it is none, or has an odd number of them.
    """
    stages = cut_replicas(graph, placement, rows)
    if not stages.is_chain or len(stages.devices) % 2:
        what = (
            f"{_devices_text(len(stages.devices))}: one would hold the same weights twice"
            if stages.is_chain
            else f"{len(stages.stages)} stages on {_devices_text(len(stages.devices))}"
        )
        raise InputError(
            f"{FLAG} needs a line of an even number of devices, one stage each, and the "
            f"partitioner made {what}",
            code="BX1288",
            at="--schedule",
            help="use an even number of devices and --partitioner analytical, or --schedule 1f1b",
        )
    return stages.devices


def _devices_text(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _both_ways(line: Sequence[str], first: Cluster, group: Cluster) -> Iterator[Mapping[str, str]]:
    """Yield what the line's devices are called in a group like it: there, and in reverse."""
    pairs = zip(first.devices, group.devices, strict=True)
    name = {ours.name: theirs.name for ours, theirs in pairs}
    yield {device: name[device] for device in line}
    yield {device: name[other] for device, other in zip(line, reversed(line), strict=True)}
