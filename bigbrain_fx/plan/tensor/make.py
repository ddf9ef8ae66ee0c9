"""Options with --tensor-parallel to the best plan: all TP ranks run the order of one column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Crossed,
    DeviceForecast,
    Forecast,
    Graph,
    Placement,
    Program,
    Sharded,
    Stages,
    TensorParallel,
)
from bigbrain_fx.plan.cut import trained
from bigbrain_fx.plan.fastest import tell
from bigbrain_fx.plan.features import Marking, marked
from bigbrain_fx.plan.judge import by_partitioner
from bigbrain_fx.plan.lightening import Step, lightened, scheduled
from bigbrain_fx.plan.memory_check import require_fits, with_data
from bigbrain_fx.plan.nouns import Case, Options, Plan, Source
from bigbrain_fx.plan.offloading import require_capacity
from bigbrain_fx.plan.one import in_pieces, schedule_for
from bigbrain_fx.plan.replicas import likeness, only
from bigbrain_fx.plan.schedule import StageCosts, stage_costs, with_saved_in_stores
from bigbrain_fx.plan.shard import sharded
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.plan.tensor.asked import require_possible, wanted_axes
from bigbrain_fx.plan.tensor.columns import (
    again_alike,
    column_of,
    cut_columns,
    joined_columns,
    moved_programs,
    part_of,
    with_room_for_all,
)
from bigbrain_fx.plan.tensor.costs import column_costs, twins
from bigbrain_fx.plan.tensor.crossings import crossings, placed_parts, with_norms
from bigbrain_fx.plan.tensor.groups import Groups, column, grouped
from bigbrain_fx.plan.tensor.messages import posted_bytes, require_growing
from bigbrain_fx.planning import crowded, label, looked_at

MOST_GROUPS = 64
"""That one pipeline is searched on; replicas are what uses more."""


def plan_tensor(case: Case) -> Plan:
    """Plan stages that groups of devices compute together, as many as was said.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic per device.
        InputError: as `group_maker`.
    """
    return by_partitioner(group_maker(case))


def group_maker(case: Case) -> GroupMaker:
    """Return what makes plans of such groups, as many ranks as was said, in the file's order.

    Raises:
        InputError: it does not go with what else was asked for.
    """
    graph, cluster, options = case.graph, case.cluster, case.options
    require_possible(cluster, options)
    assert options.tensor is not None
    shares = options.tensor_shares or (1,) * options.tensor
    groups = _looked_at(cluster, grouped(cluster, options.tensor))
    tensor = TensorParallel(groups, shares, wanted_axes(graph, options), scatters=True)
    return GroupMaker(graph, cluster, case.source, options, tensor)


def _looked_at(cluster: Cluster, groups: Groups) -> Groups:
    """Return the groups that a pipeline is searched on: all, or those of the fastest hosts."""
    if len(groups) <= MOST_GROUPS:
        return groups
    seen = looked_at(column(cluster, groups, 0), MOST_GROUPS)
    return tuple(group for group in groups if group[0] in seen.device)


@dataclass(frozen=True)
class GroupMaker:
    """Makes plans of some groups: a `Maker` of the first rank's graph on its own devices."""

    whole: Graph
    all_devices: Cluster
    source: Source
    options: Options
    tensor: TensorParallel

    @property
    def scope(self) -> str:
        """Return the common description of all of its plans."""
        count, every = len(self.tensor.groups), len(self.all_devices.devices)
        some = every // self.tensor.members
        of = f", on {count} of {some} groups" if count == MOST_GROUPS < some else ""
        return f"of these tensor groups and axes{of}"

    @property
    def graph(self) -> Graph:
        """Return the graph of the first member."""
        return self.sharded.members[0]

    @cached_property
    def cluster(self) -> Cluster:
        """The first device of each group."""
        return column(crowded(self._used), self.tensor.groups, 0)

    @cached_property
    def sharded(self) -> Sharded:
        """Return the graphs of all ranks.

        Raises:
            InputError: micro-batches may have fewer rows, and the number of rows of an exchange is
                unknown.
        """
        about = self.whole, self.tensor.axes, self.tensor.shares
        tell(f"graphs of the {self.tensor.members} ranks of each tensor group")
        tensor = self.tensor
        found = sharded(*about, scatters=tensor.scatters, crossed=tensor.crossed)
        if self.source.drop_last is False and self.whole.training:
            require_growing(found.members[0])
        return found

    @cached_property
    def _used(self) -> Cluster:
        """The devices that are in a group: others stand still, and slow nobody."""
        return only(self.all_devices, [name for group in self.tensor.groups for name in group])

    def homes_of(self, homes: Mapping[str, str]) -> dict[str, str]:
        """Return ranks' homes of ops that were placed in the whole graph; a group has one name.

        Exchanges and parts that are written around an op come before it and go along. An output is
        put together at the very end, where its parts are.
        """
        first_of = {name: group[0] for group in self.tensor.groups for name in group}
        found: dict[str, str] = {}
        around: list[str] = []
        for op in self.graph.ops:
            around.append(op.name)
            if op.name in self.whole.op:
                if op.name in homes:
                    found |= dict.fromkeys(around, first_of[homes[op.name]])
                around = []
        for name in around:
            read = [found[ref] for ref in self.graph.op[name].refs if ref in found]
            found |= dict.fromkeys([name], read[0]) if read else {}
        return found

    def estimated(self, rows: int) -> Costs:
        """Estimate the first rank's graph at so many rows."""
        return self.estimated_of_members(rows)[0]

    def estimated_of_members(self, rows: int) -> tuple[Costs, ...]:
        """Estimate every rank's graph at so many rows."""
        if rows not in self._known:
            concrete = _concrete(self.sharded, self.tensor, rows)
            about = self.tensor, self._used, self.source, self.options.estimator
            self._known[rows] = column_costs(concrete, *about)
        return self._known[rows]

    @cached_property
    def _known(self) -> dict[int, tuple[Costs, ...]]:
        return {}

    def placed(
        self,
        options: Options,
        micro_batches: int,
        placement: Placement,
        costs: Costs,
        is_trial: bool = False,
    ) -> Plan:
        """Cut every rank's graph as the first one's is placed; order and simulate."""
        rows, members = self.whole.batch // micro_batches, self.sharded.members
        placement = in_pieces(members[0], placement, options, micro_batches, costs)
        columns, schedule = self._columns(options, micro_batches, placement)
        if not (is_trial or self.tensor.crossed) and (crossed := self._crossings(columns[0], rows)):
            maker = replace(self, tensor=replace(self.tensor, crossed=crossed))
            own = placed_parts(placement, crossed)
            return maker.placed(options, micro_batches, own, maker.estimated(rows))
        with_backward = trained(members[0], columns[0].stages)
        concrete = members[0].at(rows)

        def made(stages: Stages) -> tuple[tuple[Program, ...], Forecast]:
            stages = with_saved_in_stores(concrete, stages, costs, with_backward)
            each = stage_costs(concrete, stages, costs)
            about = concrete, stages, micro_batches, each, with_backward, costs.cluster
            return scheduled(Step(*about, is_trial), schedule, options.in_flight)

        def marked(room: Costs) -> tuple[Plan, Forecast, Forecast]:
            how = options.recompute, micro_batches, made
            first, programs, forecast = lightened(concrete, columns[0], room, with_backward, *how)
            own = self._stored(again_alike(columns, first), rows, with_backward)
            about = options, micro_batches, schedule, placement
            plan = self._plan(*about, own, with_backward)
            given = () if is_trial else tuple(_of_members(programs, own[0], plan.stages))
            plan = replace(plan, programs=given)
            known = forecast if self._is_known(rows, costs) else None
            return plan, self._forecast(plan, programs, known), forecast

        about_room = costs, self.all_devices, self.tensor.groups
        plan, forecast = with_room_for_all(marked, *about_room)
        require_fits(forecast, self.all_devices)
        require_capacity(forecast, self.all_devices)
        if self.source.clip_norm is not None and self.whole.training and not is_trial:
            plan = self._known_sharded(with_norms(plan))
        return self._known_sharded(replace(plan, forecast=forecast))

    def _crossings(self, first: Stages, rows: int) -> tuple[Crossed, ...]:
        """Return what is faster in parts between groups."""
        about = self.whole.at(rows), self.graph.at(rows), first, self.tensor
        return crossings(*about, self.all_devices)

    def _plan(
        self,
        options: Options,
        micro_batches: int,
        schedule: str,
        placement: Placement,
        columns: Sequence[Stages],
        with_backward: frozenset[int],
    ) -> Plan:
        """Return what all ranks' columns make, without programs and forecast."""
        stages, count = joined_columns(columns), len(columns[0].stages)
        trains = (s + m * count for m in range(len(columns)) for s in with_backward)
        return Plan(
            self.whole,
            self.all_devices,
            self.source,
            label(options.partitioner),
            options.estimator,
            schedule,
            micro_batches,
            self.whole.batch // micro_batches,
            options.seed,
            replace(placement, tensor=self.tensor, reason=_of_groups(placement.reason)),
            stages,
            tuple(sorted(trains)),
            (),
            Forecast(0.0, ()),
            in_flight=options.in_flight,
        )

    def _forecast(
        self, plan: Plan, programs: Sequence[Program], known: Forecast | None
    ) -> Forecast:
        """Simulate each rank's column, of which all run the first one's programs."""
        first = part_of(plan.stages, 0)

        def own(member: int) -> _Column:
            column = column_of(plan.stages, member)
            return column, moved_programs(programs, first, column)

        return _forecast(
            self._known_sharded(plan), self.estimated_of_members(plan.rows), own, known
        )

    def _is_known(self, rows: int, costs: Costs) -> bool:
        """Whether the first column was simulated already as it is in a plan: no norms are sent."""
        clips = self.source.clip_norm is not None and self.whole.training
        return costs is self.estimated_of_members(rows)[0] and not clips

    def _columns(
        self, options: Options, micro_batches: int, placement: Placement
    ) -> tuple[tuple[Stages, ...], str]:
        """Cut every rank's graph as the first one's is placed; return the schedule, too."""
        schedules = []

        def mark(graph: Graph, stages: Stages) -> Stages:
            known = trained(graph, stages.stages)
            schedules.append(schedule_for(graph, stages, options, True))
            how = Marking(graph, known, options, micro_batches, schedules[-1], is_kept=True)
            return marked(stages, how)

        rows = self.whole.batch // micro_batches
        about = self.sharded.members, self.tensor.groups, placement, rows
        return cut_columns(*about, mark, twins(self.tensor)), schedules[0]

    def _stored(
        self, columns: Sequence[Stages], rows: int, with_backward: frozenset[int]
    ) -> tuple[Stages, ...]:
        """Say of each rank's stages what of their activations lies in its own store."""
        if "activations" not in columns[0].offload:
            return tuple(columns)
        concrete, costs = (
            _concrete(self.sharded, self.tensor, rows),
            self.estimated_of_members(rows),
        )
        return tuple(
            with_saved_in_stores(graph, column, own, with_backward)
            for graph, column, own in zip(concrete, columns, costs, strict=True)
        )

    def _known_sharded(self, plan: Plan) -> Plan:
        """Spare a plan to work out the ranks' graphs again."""
        plan.__dict__["sharded"] = self.sharded
        return plan


def _concrete(found: Sharded, tensor: TensorParallel, rows: int) -> list[Graph]:
    """Return each rank's graph in numbers; where ranks are alike, the first one's."""
    return [found.members[first].at(rows) for first in twins(tensor)]


_BY_FIRST = "each group by its first device: "


def _of_groups(reason: str) -> str:
    """Say it once: replicas have their reason from a plan of groups."""
    return reason and (reason if _BY_FIRST in reason else _BY_FIRST + reason)


def tensor_costs(plan: Plan) -> tuple[Costs, ...]:
    """Estimate the ops of each rank of a plan's groups again."""
    assert plan.placement.tensor is not None
    tensor = plan.placement.tensor
    concrete = _concrete(plan.sharded, tensor, plan.rows)
    used = only(plan.cluster, [name for group in tensor.groups for name in group])
    return column_costs(concrete, tensor, used, plan.source, plan.estimator)


def tensor_forecast(
    plan: Plan, costs: Sequence[Costs] | None = None, *, timeline: bool = False
) -> Forecast:
    """Simulate each column by itself: in the costs ranks wait for each other already."""

    def own(member: int) -> _Column:
        column = column_of(plan.stages, member)
        return column, moved_programs(plan.programs, part_of(plan.stages, member), column)

    return _forecast(plan, costs or tensor_costs(plan), own, None, timeline)


_Column: TypeAlias = tuple[Stages, tuple[Program, ...]]
"""One TP rank's stages, numbered from 0, and the programs of its devices."""


def _of_members(programs: Sequence[Program], first: Stages, stages: Stages) -> Iterator[Program]:
    """Yield the programs of all ranks, which run what the first one's devices do."""
    for member in range(stages.members):
        yield from moved_programs(programs, first, part_of(stages, member))


def _forecast(
    plan: Plan,
    costs: Sequence[Costs],
    own: Callable[[int], _Column],
    first: Forecast | None = None,
    timeline: bool = False,
) -> Forecast:
    """Put the columns' forecasts together; those that are alike but for names are simulated once.

    `first` is the first column's, where it is known.
    """
    assert plan.placement.tensor is not None
    known: dict[object, tuple[Cluster, Forecast]] = {}
    found = []
    for member, twin in enumerate(twins(plan.placement.tensor)):
        cluster = costs[member].cluster
        key = twin, likeness(cluster)
        if key not in known:
            given = first if member == 0 else None
            made = given or _column_forecast(plan, *own(member), member, costs[member], timeline)
            known[key] = cluster, made
        found.append(_renamed(known[key][1], known[key][0], cluster))
    step_s, posted = max(forecast.step_s for forecast in found), posted_bytes(plan)
    return Forecast(
        step_s,
        tuple(
            _in_group(entry, step_s - each.step_s, posted[entry.device])
            for each in found
            for entry in each.devices
        ),
        tuple(bar for forecast in found for bar in forecast.timeline),
    )


def _renamed(forecast: Forecast, of: Cluster, to: Cluster) -> Forecast:
    """Return one column's forecast with the devices of another."""
    if of is to:
        return forecast
    pairs = [(a.name, b.name) for a, b in zip(of.devices, to.devices, strict=True)]
    names = dict(pairs)
    if forecast.timeline:
        names |= {f"{a}->{c}": f"{b}->{d}" for a, b in pairs for c, d in pairs}
    return replace(
        forecast,
        devices=tuple(replace(entry, device=names[entry.device]) for entry in forecast.devices),
        timeline=tuple(replace(bar, device=names[bar.device]) for bar in forecast.timeline),
    )


def _in_group(entry: DeviceForecast, more_s: float, more_bytes: int) -> DeviceForecast:
    """Return what a device does and holds where its group waits for others, and sends it parts."""
    return replace(
        entry,
        idle_s=entry.idle_s + more_s,
        peak_bytes=entry.peak_bytes + more_bytes,
        messages_bytes=entry.messages_bytes + more_bytes,
        held=tuple((when_s, nbytes + more_bytes) for when_s, nbytes in entry.held),
    )


def _column_forecast(
    plan: Plan,
    stages: Stages,
    programs: Sequence[Program],
    member: int,
    costs: Costs,
    timeline: bool,
) -> Forecast:
    assert plan.placement.tensor is not None
    first = twins(plan.placement.tensor)[member]
    concrete = plan.sharded.members[first].at(plan.rows)
    each = stage_costs(concrete, stages, costs)
    if plan.source.clip_norm is not None and concrete.training:
        each = _clipping(each, stages)
    found = simulate(programs, stages, each, timeline=timeline)
    return with_data(found, concrete, stages, plan.micro_batches, plan.cluster)


def _clipping(costs: StageCosts, stages: Stages) -> StageCosts:
    """Count what clipping makes anew before the old gradients go."""
    more = {
        device: nbytes + sum(costs.gradient_bytes[stage.index] for stage in stages.of(device))
        for device, nbytes in costs.optimizer_workspace_bytes.items()
    }
    return replace(costs, optimizer_workspace_bytes=more)
