"""Options -> the best plan, another cluster's or another placement's plan, and closer looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Forecast,
    Graph,
    Placement,
    TensorParallel,
)
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.by_hand import (
    filled,
    homes_of,
    read_placement,
    require_placeable,
    with_homes,
)
from bigbrain_fx.plan.compatibility import Request, require_compatible
from bigbrain_fx.plan.fastest import fastest, fastest_number
from bigbrain_fx.plan.judge import MOST_KEPT, Maker, PipelineMaker, by_partitioner
from bigbrain_fx.plan.lightening import require_enough
from bigbrain_fx.plan.memory_check import with_data
from bigbrain_fx.plan.nouns import AUTO, Case, Options, Plan, Source
from bigbrain_fx.plan.offloading import WORDS
from bigbrain_fx.plan.one import counts, estimated, more_counts, placed, placement_of, planned_as
from bigbrain_fx.plan.renting import plan_rented
from bigbrain_fx.plan.replicas import (
    only,
    plan_mirrored,
    plan_replicas,
    replica_count,
    run_as_one,
    wants_mirror,
    with_replica_of,
)
from bigbrain_fx.plan.schedule import GPipe, require_sound, stage_costs
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.plan.strategy import is_open, plan_strategies
from bigbrain_fx.plan.tensor import (
    GroupMaker,
    axes_of_replicas,
    group_maker,
    grouped_plan,
    plan_tensor,
    require_grid,
    tensor_costs,
    tensor_forecast,
    with_tables,
)
from bigbrain_fx.planning import looked_at, of_how_many


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
    case, on_all = Case(graph, cluster, source, options), partial(_on_all, known=known)
    return _checked(plan_rented(case, on_all) if options.chooses_devices else on_all(case))


def layer_by_layer(options: Options) -> Options:
    """Return options with all that offloaded weights imply; those without, unchanged.

    Optimizer state and received activations are offloaded too, each stage runs its forward again,
    and all micro-batches of a stage run before the next one's.
    """
    if "weights" not in options.offload:
        return options
    return replace(options, offload=WORDS, recompute="all", schedule=GPipe.name, tensor=1)


def _checked(plan: Plan) -> Plan:
    """Return a plan whose programs are sound: trials were not checked, nor replicas by themselves.

    Of very large groups one column was, as all of them run.
    """
    if sum(len(each.instructions) for each in plan.programs) <= MOST_KEPT:
        require_sound(plan.programs, plan.stages)
    return plan


def _on_all(case: Case, known: Sequence[Plan] = ()) -> Plan:
    """Plan as `make_plan` does, of all devices that there are, whatever they cost."""
    require_compatible(Request(case.options, case.cluster, case.graph, case.source))
    options = layer_by_layer(case.options)
    case = replace(case, options=options)
    require_enough(case.graph, case.cluster, case.source, options.offload)
    if wants_mirror(options):
        return plan_mirrored(PipelineMaker.of(case))
    if is_open(case):
        return plan_strategies(case, partial(_on_all, known=known))
    if options.pins or options.place:
        return _by_hand(case)
    if options.wants_groups:
        return _grouped(case)
    if case.wants_replicas:
        return plan_replicas(case, _on_all, partial(_joined, case))
    if options.partitioner == AUTO:
        return _searched(case, known)
    return by_partitioner(PipelineMaker.of(case), known)


def _grouped(case: Case) -> Plan:
    """Plan tensor groups; with replicas, those of each by itself, and then all together."""
    if case.wants_replicas and run_as_one(case):
        return _of_axes(case)  # the one has axes of its own choice
    return grouped_plan(case, _of_axes)


def _of_axes(case: Case) -> Plan:
    """Plan groups that divide their work; where that does not fit, the tables besides."""
    try:
        return _of_chosen(case)
    except NoPlanError:
        more = with_tables(case.graph, case.options)
        if more is None:
            raise
    return _of_chosen(replace(case, options=more))


def _of_chosen(case: Case) -> Plan:
    if not case.wants_replicas:
        return plan_tensor(case)
    require_grid(case.cluster, case.options)
    if not run_as_one(case):  # the same in all replicas
        case = case.asking(tensor_tried=axes_of_replicas(case))
    return plan_replicas(case, _on_all, partial(_joined, case))


def _joined(case: Case, tensor: TensorParallel | None) -> Maker:
    """Return what makes plans of all replicas."""
    if tensor is None:
        return PipelineMaker.of(case)
    return GroupMaker(case.graph, case.cluster, case.source, case.options, tensor)


def _searched(case: Case, known: Sequence[Plan]) -> Plan:
    """Search a pipeline; of a very large cluster, on as many devices as a search can look at.

    Raises:
        NoPlanError: it does not fit on these.
    """
    some = of_how_many(case.cluster)
    maker = PipelineMaker.of(replace(case, cluster=looked_at(case.cluster)))
    if not some:
        return by_partitioner(maker, known)
    try:
        plan = by_partitioner(replace(maker, scope=f"{some}, {maker.scope}"), known)
    except NoPlanError as error:
        raise error.told(f"a pipeline was searched {some}") from None
    return replace(plan, cluster=case.cluster)


def _by_hand(case: Case) -> Plan:
    """Plan with modules where the user wants them; of the rest, the partitioner decides.

    Raises:
        NoPlanError: a device has no room for what is pinned to it; the arithmetic per device.
        InputError: a name is not there, "auto" was asked for as well, or the devices named are of
            several replicas.
    """
    graph, cluster, options = case.graph, case.cluster, case.options
    require_placeable(options, cluster)
    homes = homes_of(graph, cluster, options.pins)
    if options.place:
        fixed = with_homes(read_placement(options.place, graph, cluster), homes)
    else:
        fixed = filled(graph, homes, "placed around what is pinned by hand")
    if not case.wants_replicas:
        return _around(case, homes, fixed)
    return _replicas_by_hand(case, homes, fixed)


def _replicas_by_hand(case: Case, homes: Mapping[str, str], fixed: Placement) -> Plan:
    """Plan each replica as one is placed: its devices stand for those at their places elsewhere."""
    if case.options.wants_groups:
        require_grid(case.cluster, case.options)
        case = case.asking(tensor_tried=axes_of_replicas(case))
    about = replica_count(case.cluster, case.options), case.options.tensor or 1
    used = dict.fromkeys(fixed.device_of.values())
    first, cluster = with_replica_of(case.cluster, *about, used)
    here = tuple(only(cluster, first).device)

    def make(own: Case) -> Plan:
        to = dict(zip(here, own.cluster.device, strict=True))
        placement = replace(fixed, device_of={op: to[d] for op, d in fixed.device_of.items()})
        return _around(own, {op: to[device] for op, device in homes.items()}, placement)

    case = replace(case, cluster=cluster)
    return plan_replicas(case, make, partial(_joined, case))


def _around(case: Case, homes: Mapping[str, str], fixed: Placement) -> Plan:
    """Plan one replica with ops at their homes: as fixed, or around them as a partitioner says.

    Ops on one device of a tensor group are on all of it.
    """
    options = case.options
    maker = group_maker(case) if options.wants_groups else PipelineMaker.of(case)
    if isinstance(maker, GroupMaker):
        homes = maker.homes_of(homes)
        fixed = replace(fixed, device_of=maker.homes_of(fixed.device_of))
    usual = counts(maker.graph, maker.cluster, options)
    more = more_counts(maker.graph, options, max(usual))

    def make(count: int) -> Plan:
        tries = [partial(_pinned, maker, count, {}, fixed)]
        tries += [] if options.place else [partial(_pinned, maker, count, homes)]
        return fastest(tries, but=(NoPlanError,))

    try:
        return fastest_number(usual, more, make, but=(NoPlanError,))
    except NoPlanError as error:
        said = ", ".join(f"{modules}={device}" for modules, device in options.pins)
        raise error.told(f"placed by hand: {options.place or said}") from None


def _pinned(
    maker: Maker, count: int, homes: Mapping[str, str], fixed: Placement | None = None
) -> Plan:
    """Plan for so many micro-batches, as fixed, or as the partitioner says but for the homes."""
    options, costs = maker.options, maker.estimated(maker.graph.batch // count)
    return planned_as(
        lambda: fixed or placement_of(maker.graph, maker.cluster, options, count, costs),
        lambda found: maker.placed(
            options, count, found if fixed else with_homes(found, homes), costs
        ),
    )


def plan_placed(
    graph: Graph, cluster: Cluster, source: Source, options: Options, placement: Placement
) -> Plan:
    """Cut, schedule and simulate a graph whose placement is given.

    Raises:
        NoPlanError: it does not fit in memory.
        InputError: the batch cannot be split as asked, options do not go together, or the cluster
            lacks a device.
    """
    require_compatible(Request(options, cluster, graph, source, is_placed=True))
    options = layer_by_layer(options)
    homes = [placement.device_of, *(replica.device_of for replica in placement.replicas)]
    lacking = sorted({d for home in homes for d in home.values()} - set(cluster.device))
    if lacking:
        raise InputError(
            f"the cluster has no device {', '.join(lacking)}, where the placement puts ops",
            code="BX1243",
            help="leave --devices out: the plan to follow has its cluster",
        )
    usual = counts(graph, cluster, options)

    def make(count: int) -> Plan:
        costs = estimated(graph.at(graph.batch // count), cluster, source, options.estimator)
        return placed(Case(graph, cluster, source, options), count, placement, costs)

    more = () if placement.replicas else more_counts(graph, options, max(usual))
    return fastest_number(usual, more, make, but=(NoPlanError,))


def costs_of(plan: Plan) -> Costs:
    """Estimate the plan's ops again, for a closer look than plan.json holds."""
    if plan.placement.tensor is not None:
        each = tensor_costs(plan)
        ops = {device: own for costs in each for device, own in costs.ops.items()}
        measured = {device: own for costs in each for device, own in costs.measured.items()}
        scaled = {device: key for costs in each for device, key in costs.scaled.items()}
        found = replace(each[0], ops=ops, measured=measured, scaled=scaled)
        return replace(found, cluster=plan.cluster)
    return estimated(plan.graph.at(plan.rows), plan.cluster, plan.source, plan.estimator)


def measured_share(plan: Plan, costs: Costs | None = None) -> float | None:
    """Return the share of the ops' forecast time that was measured; None if nothing ever is.

    `costs` are those of `costs_of`, where they are at hand.
    """
    costs = costs or costs_of(plan)
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
    if plan.placement.tensor is not None:
        return tensor_forecast(plan, timeline=True)
    concrete = plan.graph.at(plan.rows)
    costs = stage_costs(concrete, plan.stages, costs_of(plan))
    found = simulate(plan.programs, plan.stages, costs)
    return with_data(found, concrete, plan.stages, plan.micro_batches, plan.cluster)
