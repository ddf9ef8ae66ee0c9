"""Options with --tensor -> the best plan: one column is planned, and all members run its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from bigbrain_fx.core import (
    Cluster,
    Costs,
    DeviceForecast,
    Forecast,
    Graph,
    Placement,
    Sharded,
    Stages,
    TensorParallel,
)
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan.cut import trained
from bigbrain_fx.plan.fastest import fastest
from bigbrain_fx.plan.fitting import Step, scheduled
from bigbrain_fx.plan.memory_check import require_fits, with_data
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import counts, placement_of
from bigbrain_fx.plan.schedule import StageCosts, stage_costs
from bigbrain_fx.plan.shard import sharded
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.plan.tensor.asked import require_possible
from bigbrain_fx.plan.tensor.columns import (
    column_of,
    cut_columns,
    joined_columns,
    moved_programs,
    part_of,
)
from bigbrain_fx.plan.tensor.costs import column_costs
from bigbrain_fx.plan.tensor.groups import column, grouped
from bigbrain_fx.plan.tensor.norms import with_norms
from bigbrain_fx.planning import label


def plan_tensor(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Plan stages that groups of devices compute together.

    Args:
        graph: as captured.
        cluster: its devices are grouped in the order of the file.
        source: what the model file says besides.
        options: with `tensor_along`, the axes that were tried.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic per device.
        InputError: it does not go with what else was asked for.
    """
    require_possible(graph, cluster, source, options)
    shares = options.tensor_shares or (1,) * options.tensor
    groups = grouped(cluster, options.tensor)
    tensor = TensorParallel(groups, shares, options.tensor_along)
    made = sharded(graph, tensor.axes, shares)
    work = _Work(graph, made, tensor, cluster, source, options)
    tries = [
        partial(work.plan, count) for count in counts(graph, column(cluster, groups, 0), options)
    ]
    return fastest(tries, but=(NoPlanError,))


@dataclass(frozen=True)
class _Work:
    """What plans of several numbers of micro-batches have in common."""

    graph: Graph
    sharded: Sharded
    tensor: TensorParallel
    cluster: Cluster
    source: Source
    options: Options

    def plan(self, micro_batches: int) -> Plan:
        """Plan a step of so many micro-batches."""
        rows = self.graph.batch // micro_batches
        concrete = [graph.at(rows) for graph in self.sharded.members]
        about = self.tensor.groups, self.cluster, self.source, self.options.estimator
        costs = column_costs(concrete, *about)
        placement = self._placement(micro_batches, costs[0])
        columns = cut_columns(self.sharded.members, self.tensor.groups, placement, rows)
        with_backward = trained(self.sharded.members[0], columns[0].stages)
        schedule = self.options.schedule or ("1f1b" if columns[0].is_chain else "list")
        first = Step(
            concrete[0],
            columns[0],
            micro_batches,
            stage_costs(concrete[0], columns[0], costs[0]),
            with_backward,
            costs[0].cluster,
        )
        programs, _ = scheduled(first, schedule, self.options.in_flight)
        stages = joined_columns(columns)
        count = len(columns[0].stages)
        plan = Plan(
            self.graph,
            self.cluster,
            self.source,
            label(self.options.partitioner),
            self.options.estimator,
            schedule,
            micro_batches,
            rows,
            self.options.seed,
            replace(placement, tensor=self.tensor),
            stages,
            tuple(sorted(s + m * count for m in range(len(columns)) for s in with_backward)),
            tuple(
                program
                for own in (part_of(stages, member) for member in range(len(columns)))
                for program in moved_programs(programs, columns[0], own)
            ),
            Forecast(0.0, ()),
            in_flight=self.options.in_flight,
        )
        plan.__dict__["sharded"] = self.sharded
        if self.source.clip_norm is not None:
            plan = with_norms(plan)
            plan.__dict__["sharded"] = self.sharded
        forecast = tensor_forecast(plan, costs)
        require_fits(forecast, self.cluster)
        plan = replace(plan, forecast=forecast)
        plan.__dict__["sharded"] = self.sharded
        return plan

    def _placement(self, micro_batches: int, costs: Costs) -> Placement:
        """Place the first member's ops on the first device of each group."""
        graph, options = self.sharded.members[0], self.options
        own = column(self.cluster, self.tensor.groups, 0)
        return placement_of(graph, own, options, micro_batches, costs)


def tensor_costs(plan: Plan) -> tuple[Costs, ...]:
    """Estimate the ops of each member of a plan's groups again."""
    assert plan.placement.tensor is not None
    concrete = [graph.at(plan.rows) for graph in plan.sharded.members]
    groups = plan.placement.tensor.groups
    return column_costs(concrete, groups, plan.cluster, plan.source, plan.estimator)


def tensor_forecast(
    plan: Plan, costs: Sequence[Costs] | None = None, *, timeline: bool = False
) -> Forecast:
    """Simulate each column by itself: in the costs members wait for each other already."""
    costs = costs or tensor_costs(plan)
    found = [_column_forecast(plan, member, own, timeline) for member, own in enumerate(costs)]
    step_s = max(forecast.step_s for forecast in found)
    return Forecast(
        step_s,
        tuple(_waiting(e, step_s - own.step_s) for own in found for e in own.devices),
        tuple(bar for forecast in found for bar in forecast.timeline),
    )


def _waiting(entry: DeviceForecast, more_s: float) -> DeviceForecast:
    return replace(entry, idle_s=entry.idle_s + more_s)


def _column_forecast(plan: Plan, member: int, costs: Costs, timeline: bool) -> Forecast:
    concrete = plan.sharded.members[member].at(plan.rows)
    stages = column_of(plan.stages, member)
    programs = moved_programs(plan.programs, part_of(plan.stages, member), stages)
    each = stage_costs(concrete, stages, costs)
    if plan.source.clip_norm is not None:
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
