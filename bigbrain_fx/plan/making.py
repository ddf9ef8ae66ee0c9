"""Options -> the best plan, another cluster's or another placement's plan, and closer looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import Cluster, Costs, Forecast, Graph, Placement
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.fitting import with_data
from bigbrain_fx.plan.judge import Judge
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
from bigbrain_fx.plan.one import counts, estimated, placed, planned
from bigbrain_fx.recompute import wanted_by
from bigbrain_fx.schedule import stage_costs
from bigbrain_fx.simulate import simulate


def make_plan(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    known: Sequence[Plan] = (),
) -> Plan:
    """Place, cut, schedule and simulate.

    With no number of micro-batches given, try those that divide the batch and keep the fastest.

    Args:
        graph: as captured.
        cluster: where it runs.
        source: what the model file says besides.
        options: what was chosen; the partitioner "auto" chooses all that was left open.
        known: plans of the same graph, of a poorer cluster, say: "auto" is no worse than what they
            would take here.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic per device.
        InputError: the batch cannot be split as asked.
    """
    if options.partitioner == AUTO:
        return Judge(graph, cluster, source, options).plan(known)
    found: list[Plan] = []
    failure: NoPlanError | None = None
    for count in counts(graph, cluster, options):
        try:
            found.append(planned(graph, cluster, source, options, count))
        except NoPlanError as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda plan: plan.forecast.step_s)


def plan_placed(
    graph: Graph, cluster: Cluster, source: Source, options: Options, placement: Placement
) -> Plan:
    """Cut, schedule and simulate a graph whose placement is given.

    Raises:
        NoPlanError: it does not fit in memory.
        InputError: the batch cannot be split as asked, or the cluster lacks a device.
    """
    lacking = sorted(set(placement.device_of.values()) - set(cluster.device))
    if lacking:
        raise InputError(
            f"the cluster has no device {', '.join(lacking)}, where the placement puts ops",
            help="leave --devices out: the plan to follow has its cluster",
        )
    plans = []
    for count in counts(graph, cluster, options):
        concrete = graph.at(graph.batch // count)
        costs = estimated(concrete, cluster, source, options.estimator)
        plans.append(placed(graph, cluster, source, options, count, placement, costs))
    return min(plans, key=lambda plan: plan.forecast.step_s)


def replan(plan: Plan, cluster: Cluster) -> Plan:
    """Make the same plan's choices again for another cluster: what would it give there?"""
    options = Options(
        plan.partitioner,
        plan.estimator,
        None,
        plan.micro_batches,
        plan.seed,
        recompute=wanted_by(plan.stages, plan.trained),
    )
    if plan.search is None:
        return make_plan(plan.graph, cluster, plan.source, options)
    again = replace(
        options, recompute=None, objective=plan.search.objective, effort=plan.search.effort
    )
    return make_plan(plan.graph, cluster, plan.source, again, known=(plan,))


def with_placement(plan: Plan, placement: Placement, costs: Costs | None = None) -> Plan:
    """Return the plan with another placement, all its other choices kept where they still apply.

    Args:
        plan: to change.
        placement: where its ops go.
        costs: `costs_of(plan)` where it is known already.

    Raises:
        NoPlanError: it does not fit in memory.
    """
    options = Options(
        plan.partitioner,
        plan.estimator,
        plan.schedule,
        plan.micro_batches,
        plan.seed,
        plan.in_flight,
        recompute=wanted_by(plan.stages, plan.trained),
    )
    return placed(
        plan.graph,
        plan.cluster,
        plan.source,
        options,
        plan.micro_batches,
        placement,
        costs or costs_of(plan),
        keep_schedule=False,
    )


def costs_of(plan: Plan) -> Costs:
    """Estimate the plan's ops again, for a closer look than plan.json holds."""
    return estimated(plan.graph.at(plan.rows), plan.cluster, plan.source, plan.estimator)


def measured_share(plan: Plan) -> float | None:
    """Return the share of the ops' forecast time that was measured; None if nothing ever is."""
    costs = costs_of(plan)
    if not costs.measured:
        return None
    known = {device: set(ops) for device, ops in costs.measured.items()}
    measured_s = total_s = 0.0
    for stage in plan.stages.stages:
        for op in stage.ops:
            cost = costs.op_cost(op, stage.device)
            taken_s = cost.forward_s + cost.backward_s
            total_s += taken_s
            measured_s += taken_s if op in known[stage.device] else 0.0
    return measured_s / total_s if total_s else 1.0


def timeline(plan: Plan) -> Forecast:
    """Simulate the plan again, with its timeline."""
    concrete = plan.graph.at(plan.rows)
    costs = stage_costs(concrete, plan.stages, costs_of(plan))
    found = simulate(plan.programs, plan.stages, costs)
    return with_data(found, concrete, plan.stages, plan.micro_batches, plan.cluster)
