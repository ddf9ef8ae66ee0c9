"""Options with replicas -> the best plan: a plan for each replica by itself, then all as one.

Replicas on clusters that differ in names only share a plan. This file places no op itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from bigbrain_fx.core import (
    Cluster,
    Graph,
    Placement,
    Replica,
    TensorParallel,
    micro_text,
    sums_each,
)
from bigbrain_fx.errors import InputError, NoPlanError, ScheduleError
from bigbrain_fx.plan.fastest import halved, tell, until_stopped
from bigbrain_fx.plan.fold import in_parts
from bigbrain_fx.plan.judge import Maker, PipelineMaker
from bigbrain_fx.plan.nouns import AUTO, Case, Options, Plan, Source
from bigbrain_fx.plan.one import counts, estimated, more_counts, placed
from bigbrain_fx.plan.recompute import Defer, Wanted
from bigbrain_fx.plan.replica_cut import with_breaks
from bigbrain_fx.plan.replicas.as_another import (
    ABOUT,
    LONG,
    SAME,
    again_of,
    has_kinds,
    in_flight_of,
    is_long,
    is_plain,
    names,
    renamed,
    require_alike_micros,
    require_collectives,
    schedule_of,
)
from bigbrain_fx.plan.replicas.directions import with_directions
from bigbrain_fx.plan.replicas.divide import (
    FEW,
    Group,
    asked,
    by_speed,
    divide,
    evened,
    likeness,
    numbered,
    only,
    replica_count,
    require_few_messages,
    require_room_to_fold,
    shard_group,
)
from bigbrain_fx.planning import label, nameless

MOST_TRIED = 32
"""Devices up to which every number of micro-batches is tried for all replicas together."""
PlanReplica: TypeAlias = Callable[[Case], Plan]
"""Plan one replica."""
Join: TypeAlias = Callable[[TensorParallel | None], Maker]
"""Make plans of all replicas: of pipelines, or of these tensor groups."""


def plan_replicas(case: Case, make: PlanReplica, join: Join) -> Plan:
    """Plan replicas, as many as asked for.

    Args:
        case: all devices, and what was asked for of all replicas together.
        make: plans one of them; its devices may compute in groups.
        join: makes plans of all.

    Raises:
        NoPlanError: a replica fits on no such part of the cluster.
        InputError: replicas cannot be made as asked.
    """
    cluster, options = case.cluster, case.options
    count = replica_count(cluster, options)
    if count == 1 and options.all_reduce_order != "tree":
        return make(replace(_of_one(case), cluster=only(cluster, _all_of(cluster))))
    require_few_messages(count)
    groups = divide(cluster, count, options.tensor or 1) if count > 1 else (_all_of(cluster),)
    require_room_to_fold(options, groups)
    work = _Work(case, make, join, groups)
    if run_as_one(case, groups):
        best = work.as_one_is()
        _require_one_kind(best)
        return best
    with until_stopped():  # whoever presses Ctrl-C in one search wants no other
        best = work.plan(numbers_of(case, count)[0])
    _require_one_kind(best)
    if best.stages.by_backend:
        require_collectives(best)
    return halved(best, case, work.as_said)


def run_as_one(case: Case, groups: Sequence[Group] | None = None) -> bool:
    """Whether these are many devices, in replicas of which one's plan is all of theirs."""
    graph, cluster, options = case.graph, case.cluster, case.options
    count = options.replicas or len(cluster.replicas) or 1
    asked, step = options.micro_batches or count, count * (graph.static_batch or 1)
    if count == 1 or len(cluster.devices) <= MOST_TRIED or options.replica_shares:
        return False
    if graph.batch % step or asked % count or options.all_reduce_order == "backend":
        return False
    if groups is None:
        require_few_messages(count)
        groups = divide(cluster, count, options.tensor or 1)
    return len({likeness(only(cluster, group)) for group in groups}) == 1


def _of_one(case: Case) -> Case:
    """Return what was chosen without what only replicas have."""
    alone = case.asking(replicas=None, replica_shares=(), zero_stage=0, sum_order="replica")
    return alone.asking(shard_group=None, tensor=case.options.tensor or 1)


def _again(plan: Plan) -> dict[str, Wanted]:
    """Return what a plan's stages run again as a choice; nothing, where they run nothing again."""
    return {"recompute": plan.stages.recompute} if plan.stages.recompute else {}


def _reason(first: Plan, options: Options) -> str:
    """Say why the first replica is placed so, and which all-reduce order was chosen."""
    own = f"replica 0: {first.placement.reason}" if first.placement.reason else ""
    if options.sum_order is not None or options.zero_stage < 2:
        return own
    zero = f"ZeRO {options.zero_stage}"
    chosen = (
        f"--all-reduce-order {options.all_reduce_order} was chosen, since {zero} keeps no other sum"
    )
    return f"{own}; {chosen}" if own else chosen


def _require_one_kind(plan: Plan) -> None:
    """Refuse replicas that would each update their weights to bits of their own.

    Optimizers of CPUs and GPUs do not round alike.
    """
    for bucket in plan.stages.buckets if not plan.stages.zero_stage else ():
        devices = [plan.stages.stages[stage].device for stage in bucket.stages]
        kinds = sorted({plan.cluster.device[name].kind for name in devices})
        if len(kinds) > 1:
            raise InputError(
                f"{' and '.join(devices)} hold the same weights, and a {kinds[0]} and a {kinds[1]} "
                "do not update them to the same bits",
                code="BX1280",
                help="add --zero 1: one of them updates a weight, and the others take it",
            )


def _all_of(cluster: Cluster) -> Group:
    """Return the devices of the only replica: all, or those that the cluster file names."""
    return cluster.replicas[0] if len(cluster.replicas) == 1 else tuple(cluster.device)


def numbers_of(case: Case, count: int) -> Sequence[int]:
    """Return the numbers of micro-batches to try, ascending: one at least for each replica.

    Raises:
        InputError: the batch gives no such number.
    """
    graph, options = case.graph, case.options
    tried = counts(graph, case.cluster, options)
    further = more_counts(graph, options, max(tried))
    shared = sum(options.replica_shares) or 1
    enough = [number for number in (*tried, *further) if number >= count]
    if not enough:
        raise _too_few(graph, options, count, max(tried))
    return [number for number in enough if number % shared == 0] or enough[-1:]


def _too_few(graph: Graph, options: Options, count: int, most: int) -> InputError:
    more = next((n for n in range(count, graph.batch + 1) if graph.batch % n == 0), None)
    return InputError(
        f"{count} replicas need a micro-batch each, and a step has {most}",
        code="BX1281",
        at="--replicas",
        help=f"--replicas {most}, or a larger batch"
        if options.micro_batches is None or more is None
        else f"--micro-batches {more}, which divides the batch of {graph.batch}",
    )


@dataclass
class _Work:
    """Plans of single replicas of one model on one cluster: mutable, remembers what it planned."""

    case: Case
    make: PlanReplica
    join: Join
    groups: tuple[Group, ...]
    known: dict[tuple[object, int, int], Plan] = field(default_factory=dict)

    def plan(self, micro_batches: int) -> Plan:
        """Plan a step of so many micro-batches."""
        each = sums_each(self.case.options.all_reduce_order, self.case.options.zero_stage)
        micros = numbered(self._shares(micro_batches), in_turn=each)
        rows = self.case.graph.batch // micro_batches
        alone = [self._alone(i, rows, len(micros[i])) for i in range(len(self.groups))]
        if not self._may_reverse:
            return self.joined(micro_batches, alone, micros)
        return with_directions(alone, lambda each: self.joined(micro_batches, each, micros))

    @property
    def _may_reverse(self) -> bool:
        """Whether `auto` may reverse chains, and it counts: few devices have unlike links."""
        cluster, options = self.case.cluster, self.case.options
        if options.partitioner != AUTO or options.pins or options.place:
            return False
        return bool(cluster.links) and len(self.groups) < len(cluster.devices) <= FEW

    def as_said(self, options: Options, micro_batches: int) -> Plan:
        """Plan a step of so many micro-batches as other options say."""
        case = replace(self.case, options=options)
        return replace(self, case=case, known={}).plan(micro_batches)

    def as_one_is(self) -> Plan:
        """Plan one replica, its micro-batches left open, and all as it is."""
        count, asked = len(self.groups), self.case.options.micro_batches
        alone = self._made(0, self.case.graph.batch // count, asked and asked // count)
        each = sums_each(self.case.options.all_reduce_order, self.case.options.zero_stage)
        micros = numbered([alone.micro_batches] * count, in_turn=each)
        return self.joined(alone.micro_batches * count, [alone] * count, micros)

    def _shares(self, micro_batches: int) -> tuple[int, ...]:
        if self.case.options.replica_shares:
            return asked(micro_batches, self.case.options.replica_shares, self.case.graph.batch)
        rows = self.case.graph.batch // micro_batches
        each, count = max(1, micro_batches // len(self.groups)), len(self.groups)
        steps_s = (self._alone(i, rows, each).forecast.step_s for i in range(count))
        dealt = by_speed(micro_batches, [each / max(step_s, 1e-12) for step_s in steps_s])
        are_lines = max(map(len, self.groups)) > 1
        return evened(dealt, partial(self._seconds, rows)) if are_lines else dealt

    def _seconds(self, rows: int, number: int, micro_batches: int) -> tuple[float, float]:
        """Return a replica's step, and the least that a micro-batch more would add to it."""
        with suppress(NoPlanError):
            alone = self._alone(number, rows, micro_batches).forecast
            busy_s = sum(device.busy_s for device in alone.devices) / len(self.groups[number])
            return alone.step_s, busy_s / micro_batches
        return float("inf"), 0.0

    def _alone(self, number: int, rows: int, micro_batches: int) -> Plan:
        """Plan one replica by itself, with its own micro-batches as the batch."""
        cluster = only(self.case.cluster, self.groups[number])
        key = likeness(cluster), rows, micro_batches
        if key not in self.known:
            about = rows, micro_batches
            found = self._as_another(cluster, *about) or self._as_shorter(number, cluster, *about)
            self.known[key] = found or self._made(number, rows * micro_batches, micro_batches)
        return self.known[key]

    def _as_shorter(
        self, number: int, cluster: Cluster, rows: int, micro_batches: int
    ) -> Plan | None:
        """Return a replica of very many micro-batches, cut as it is for fewer of them.

        A search over identical devices then simulates few. Heterogeneous ones were cut 3 % worse.
        """
        few = LONG * len(cluster.devices)
        is_alike = len(set(map(nameless, cluster.devices))) == 1
        is_shorter = is_alike and micro_batches > ABOUT * few
        plan = self._alone(number, rows, few) if is_shorter else None
        if plan is None or not is_plain(plan):
            return None
        with suppress(NoPlanError):
            return self._placed_alone(plan, cluster, micro_batches)
        return None

    def _as_another(self, cluster: Cluster, rows: int, micro_batches: int) -> Plan | None:
        """Return the plan of a replica of the same devices, placed here, if that is as good.

        Such a replica has other links, or other micro-batches: where these are many, or None. Each
        kind of replica is then searched once, for an even share of the batch.
        """
        like = likeness(cluster)
        for (other, its_rows, _), plan in self.known.items():
            if its_rows != rows or not is_plain(plan):
                continue
            is_same = plan.micro_batches == micro_batches and has_kinds(plan, cluster)
            if not (is_long(plan, micro_batches) if other == like else is_same):
                continue
            with suppress(NoPlanError):
                found = self._placed_alone(plan, cluster, micro_batches)
                if other == like or found.forecast.step_s <= SAME * plan.forecast.step_s:
                    return found
        return None

    def _placed_alone(self, plan: Plan, cluster: Cluster, micro_batches: int) -> Plan:
        """Cut and order a replica as a plan does, for another number of its micro-batches."""
        given = self._asked(micro_batches).asking(
            schedule=plan.schedule, in_flight=plan.in_flight, **_again(plan)
        )
        graph = plan.graph.of_batch(plan.rows * micro_batches)
        case = replace(given, graph=graph, cluster=cluster, source=plan.source)
        placement = replace(plan.placement, device_of=renamed(plan, cluster))
        costs = estimated(graph.at(plan.rows), cluster, plan.source, given.options.estimator)
        return placed(case, micro_batches, placement, costs, is_trial=True)

    def _made(self, number: int, batch: int, micro_batches: int | None) -> Plan:
        """Plan one replica by itself, for a batch of its own."""
        cluster = self._roomy(only(self.case.cluster, self.groups[number]))
        case = replace(self._asked(micro_batches), cluster=cluster, source=self._source())
        try:
            return self.make(replace(case, graph=self.case.graph.of_batch(batch)))
        except InputError as error:  # what it says of micro-batches is of this replica's
            count = len(self.groups)
            if count > 1 and "--micro-batches" in (error.help or ""):
                times = Fraction(self.case.graph.batch, batch)
                said = f"the numbers are of one replica; all {count} have {times} times as many"
                error.notes = (*error.notes, said)
            raise

    def _asked(self, micro_batches: int | None) -> Case:
        """Return what was chosen, for one replica of so many micro-batches."""
        again = self.case.options.recompute  # numbers are of all replicas' stages
        return _of_one(self.case).asking(
            micro_batches=micro_batches,
            recompute=None if isinstance(again, tuple) and again else again,
            defer=self._defer(),
            in_flight=None,
        )

    def _defer(self) -> Defer:
        """Return what one replica defers; unasked nothing: all have one schedule, chosen later."""
        defer = self.case.options.defer
        if self.case.options.schedule is None:
            return "all" if defer == "all" else ()
        return None if isinstance(defer, tuple) else defer

    def _roomy(self, cluster: Cluster) -> Cluster:
        """Return a replica's devices as if its weights took no room: with ZeRO 3 few of them stay.

        With ZeRO 1 and 2 of many devices, with less: shares of the state are not even.

        Whether they fit is said of all replicas together, whose account is exact.
        """
        held = {p.canonical: p.spec.nbytes for p in self.case.graph.params if p.spec.requires_grad}
        state = max((self.case.source.optimizer_state, *self.case.source.optimizer_states.values()))
        if self.case.options.zero_stage == 3:
            more = int(sum(held.values()) * (2 + state))
        elif self.case.options.zero_stage and len(self.case.cluster.devices) > MOST_TRIED:
            # parameters are dealt out whole: somebody has one more than an even share
            more = -int(2 * state * max(held.values(), default=0) / (self.case.options.tensor or 1))
        else:
            return cluster
        roomy = (replace(d, memory_bytes=max(1, d.memory_bytes + more)) for d in cluster.devices)
        return replace(cluster, devices=tuple(roomy))

    def _source(self) -> Source:
        """Return the model's source; with ZeRO a replica keeps a part of the optimizer's state."""
        shards = shard_group(self.case.cluster, self.case.options, self.groups) or len(self.groups)
        parts = shards if self.case.options.zero_stage else 1
        states = {name: each / parts for name, each in self.case.source.optimizer_states.items()}
        state = self.case.source.optimizer_state / parts
        return replace(self.case.source, optimizer_state=state, optimizer_states=states)

    def joined(
        self, micro_batches: int, alone: Sequence[Plan], micros: Sequence[tuple[int, ...]]
    ) -> Plan:
        """Plan all replicas together: each as it is alone, with these micro-batches."""
        tell(f"{len(self.groups)} replicas together, {micro_text(micro_batches)}")
        options = self.case.options
        if options.zero_stage == 2 and options.all_reduce_order == "backend":
            require_alike_micros(micros)  # before one waits for the other's collective for ever
        maker = self.join(self._tensor(alone))
        replicas = tuple(
            Replica(
                renamed(plan, only(self.case.cluster, group)),
                own,
                plan.in_flight,
                plan.placement.breaks,
            )
            for plan, group, own in zip(alone, self.groups, micros, strict=True)
        )
        placement = Placement(
            replicas[0].device_of,
            _reason(alone[0], options),
            replicas,
            options.zero_stage,
            options.all_reduce_order,
            shard_group=shard_group(self.case.cluster, options, self.groups),
        )
        rows = self.case.graph.batch // micro_batches
        placements = [placement]
        if options.zero_stage == 3:
            placements = [*in_parts(maker.graph, placement, rows)]
        *coarser, finest = (with_breaks(maker.graph, each, rows) for each in placements)
        for each in coarser:
            with suppress(NoPlanError):
                return self._placed(maker, micro_batches, alone, each)
        return self._placed(maker, micro_batches, alone, finest)

    def _placed(
        self, maker: Maker, micro_batches: int, alone: Sequence[Plan], placement: Placement
    ) -> Plan:
        """Cut, order and judge all replicas of a placement, each in the order it has alone.

        Raises:
            InputError: they would wait for each other.
            NoPlanError: it does not fit in memory.
        """
        options, rows = self.case.options, self.case.graph.batch // micro_batches
        schedule = schedule_of(alone, placement)
        chosen = replace(
            options,
            schedule=schedule,
            in_flight=options.in_flight or in_flight_of(alone, schedule),
            recompute=options.recompute or tuple(again_of(maker.graph, placement, rows, alone)),
        )
        try:
            about = chosen, micro_batches, placement, maker.estimated(rows)
            plan = maker.placed(*about, is_trial=isinstance(maker, PipelineMaker))
        except ScheduleError as error:
            raise InputError(
                "replicas would wait for each other in a circle: they sum micro-batches in the "
                "order of their numbers, and do not come to them in one order",
                code="BX1282",
                notes=(error.what,),
                help="--all-reduce-order replica, or --schedule 1f1b on a --partitioner that "
                "makes chains",
            ) from error
        return replace(plan, partitioner=label(options.partitioner))

    def _tensor(self, alone: Sequence[Plan]) -> TensorParallel | None:
        """Return the tensor groups of all replicas; each divides the same axes in the same way."""
        tensor = alone[0].placement.tensor
        if tensor is None:
            return None
        every = (
            tuple(tuple(to[name] for name in own) for own in groups.groups)
            for plan, group in zip(alone, self.groups, strict=True)
            for to in [names(plan, only(self.case.cluster, group))]
            for groups in [plan.placement.tensor]
            if groups is not None
        )
        return replace(tensor, groups=tuple(own for groups in every for own in groups))
