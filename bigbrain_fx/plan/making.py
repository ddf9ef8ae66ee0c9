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
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
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
    on_all = partial(_on_all, known=known)
    if options.chooses_devices:
        return _checked(plan_rented(graph, cluster, source, options, on_all))
    return _checked(on_all(graph, cluster, source, options))


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


def _on_all(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    known: Sequence[Plan] = (),
) -> Plan:
    """Plan as `make_plan` does, of all devices that there are, whatever they cost."""
    require_compatible(Request(options, cluster, graph, source))
    options = layer_by_layer(options)
    require_enough(graph, cluster, source, options.offload)
    if wants_mirror(options):
        return plan_mirrored(PipelineMaker(graph, cluster, source, options), source)
    if is_open(graph, cluster, options):
        return plan_strategies(graph, cluster, source, options, partial(_on_all, known=known))
    if options.pins or options.place:
        return _by_hand(graph, cluster, source, options)
    if options.wants_groups:
        return _grouped(graph, cluster, source, options)
    if options.wants_replicas(cluster, trains=graph.training):
        join = partial(_joined, graph, cluster, source, options)
        return plan_replicas(graph, cluster, source, options, _on_all, join)
    if options.partitioner == AUTO:
        return _searched(graph, cluster, source, options, known)
    return by_partitioner(PipelineMaker(graph, cluster, source, options), known)


def _grouped(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Plan tensor groups; with replicas, those of each by itself, and then all together."""
    make = partial(_of_axes, graph, cluster, source)
    if options.wants_replicas(cluster, trains=graph.training) and run_as_one(
        graph, cluster, options
    ):
        return make(options)  # the one has axes of its own choice
    return grouped_plan(graph, options, make)


def _of_axes(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Plan groups that divide their work; where that does not fit, the tables besides."""
    try:
        return _of_chosen(graph, cluster, source, options)
    except NoPlanError:
        more = with_tables(graph, options)
        if more is None:
            raise
    return _of_chosen(graph, cluster, source, more)


def _of_chosen(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    if not options.wants_replicas(cluster, trains=graph.training):
        return plan_tensor(graph, cluster, source, options)
    require_grid(graph, cluster, options)
    if not run_as_one(graph, cluster, options):  # the same in all replicas
        options = replace(options, tensor_tried=axes_of_replicas(graph, cluster, options))
    join = partial(_joined, graph, cluster, source, options)
    return plan_replicas(graph, cluster, source, options, _on_all, join)


def _joined(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    tensor: TensorParallel | None,
) -> Maker:
    """Return what makes plans of all replicas."""
    about = graph, cluster, source, options
    return PipelineMaker(*about) if tensor is None else GroupMaker(*about, tensor)


def _searched(
    graph: Graph, cluster: Cluster, source: Source, options: Options, known: Sequence[Plan]
) -> Plan:
    """Search a pipeline; of a very large cluster, on as many devices as a search can look at.

    Raises:
        NoPlanError: it does not fit on these.
    """
    seen, some = looked_at(cluster), of_how_many(cluster)
    maker = PipelineMaker(graph, seen, source, options)
    if not some:
        return by_partitioner(maker, known)
    try:
        plan = by_partitioner(replace(maker, scope=f"{some}, {maker.scope}"), known)
    except NoPlanError as error:
        raise error.told(f"a pipeline was searched {some}") from None
    return replace(plan, cluster=cluster)


def _by_hand(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Plan with modules where the user wants them; of the rest, the partitioner decides.

    Raises:
        NoPlanError: a device has no room for what is pinned to it; the arithmetic per device.
        InputError: a name is not there, "auto" was asked for as well, or the devices named are of
            several replicas.
    """
    require_placeable(options, cluster)
    homes = homes_of(graph, cluster, options.pins)
    if options.place:
        fixed = with_homes(read_placement(options.place, graph, cluster), homes)
    else:
        fixed = filled(graph, homes, "placed around what is pinned by hand")
    if not options.wants_replicas(cluster, trains=graph.training):
        return _around(graph, cluster, source, options, homes, fixed)
    return _replicas_by_hand(graph, cluster, source, options, homes, fixed)


def _replicas_by_hand(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    homes: Mapping[str, str],
    fixed: Placement,
) -> Plan:
    """Plan each replica as one is placed: its devices stand for those at their places elsewhere."""
    if options.wants_groups:
        require_grid(graph, cluster, options)
        options = replace(options, tensor_tried=axes_of_replicas(graph, cluster, options))
    about = replica_count(cluster, options), options.tensor or 1
    first, cluster = with_replica_of(cluster, *about, dict.fromkeys(fixed.device_of.values()))
    here = tuple(only(cluster, first).device)

    def make(graph: Graph, own: Cluster, source: Source, options: Options) -> Plan:
        to = dict(zip(here, own.device, strict=True))
        placement = replace(fixed, device_of={op: to[d] for op, d in fixed.device_of.items()})
        pinned = {op: to[device] for op, device in homes.items()}
        return _around(graph, own, source, options, pinned, placement)

    join = partial(_joined, graph, cluster, source, options)
    return plan_replicas(graph, cluster, source, options, make, join)


def _around(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    homes: Mapping[str, str],
    fixed: Placement,
) -> Plan:
    """Plan one replica with ops at their homes: as fixed, or around them as a partitioner says.

    Ops on one device of a tensor group are on all of it.
    """
    maker = _maker_by_hand(graph, cluster, source, options)
    if isinstance(maker, GroupMaker):
        homes, fixed = maker.homes_of(homes), _of_members(maker, fixed)
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


def _maker_by_hand(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Maker:
    if options.wants_groups:
        return group_maker(graph, cluster, source, options)
    return PipelineMaker(graph, cluster, source, options)


def _of_members(maker: GroupMaker, placement: Placement) -> Placement:
    return replace(placement, device_of=maker.homes_of(placement.device_of))


def _pinned(
    maker: Maker, count: int, homes: Mapping[str, str], fixed: Placement | None = None
) -> Plan:
    """Plan for so many micro-batches, as fixed, or as the partitioner says but for the homes."""
    options, costs = maker.options, maker.estimated(maker.graph.batch // count)
    about = maker.graph, maker.cluster, options, count, costs
    return planned_as(
        lambda: fixed or placement_of(*about),
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
        return placed(graph, cluster, source, options, count, placement, costs)

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
