"""One number of micro-batches -> one plan: estimate, place, cut, schedule, simulate.

The module plans once; it compares nothing and searches for nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Forecast,
    Graph,
    GroupEstimator,
    OpCost,
    Partitioner,
    Placement,
    Program,
    Stages,
)
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.cut import trained
from bigbrain_fx.plan.features import Marking, marked, seen_by_planners
from bigbrain_fx.plan.fold import (
    folded,
    in_layers,
    micro_option,
    taken_counts,
)
from bigbrain_fx.plan.lightening import Step, lightened, scheduled
from bigbrain_fx.plan.memory_check import (
    for_tensors,
    require_fits,
)
from bigbrain_fx.plan.nouns import Case, Options, Plan, Source
from bigbrain_fx.plan.offloading import as_planners_see, require_capacity
from bigbrain_fx.plan.replica_cut import cut_replicas, with_waiting_buckets
from bigbrain_fx.plan.schedule import (
    stage_costs,
    traits,
    with_saved_in_stores,
)
from bigbrain_fx.plan.simulate import in_a_row
from bigbrain_fx.planning import asked, crowded, estimator, is_own, label, options_of, partitioner

TIGHT = "the nearest to what fits by the partitioner's upper bound; by the plan's ledger it fits"


def counts(graph: Graph, cluster: Cluster, options: Options, per_device: int = 4) -> list[int]:
    """Return how many micro-batches to try: as asked for, or every divisor up to 4 per device."""
    batch = graph.batch
    if graph.static_batch is not None:
        fixed = batch // graph.static_batch
        if options.micro_batches not in (None, fixed):
            raise InputError(
                f"the trace of {graph.name} holds for {graph.static_batch} rows only (dimension 0 "
                f"of the batch's first tensor), so a batch of {batch} has {fixed} micro-batches, "
                f"not {options.micro_batches}",
                code="BX1251",
                help=f"use --micro-batches {fixed}, or another batch size in example_batch(); a "
                "list of images, or what else is not cut along dimension 0, is cut by the model "
                "file: def micro(batch, parts)",
            )
        return [fixed]
    if not graph.rows_apart:
        return [_one(graph, options)]
    if options.micro_batches is None:
        most = max(1, per_device * len(cluster.devices))
        return [count for count in range(1, min(batch, most) + 1) if batch % count == 0]
    if options.micro_batches < 1 or batch % options.micro_batches:
        raise InputError(
            f"a batch of {batch} rows cannot be split into {options.micro_batches} equal "
            "micro-batches",
            code="BX1252",
            help=_of_rows(batch, options.micro_batches, _taken(batch, cluster, options)),
        )
    return [options.micro_batches]


def more_counts(graph: Graph, options: Options, last: int) -> Iterator[int]:
    """Yield further numbers of micro-batches than `counts`: of half the rows each, down to one row.

    Such numbers are for batches of many rows: 4 micro-batches a device may be too large for its
    memory, or leave a long pipeline idle.
    """
    is_open = options.micro_batches is None and graph.static_batch is None and graph.rows_apart
    while is_open and 2 * last <= graph.batch:
        last = next(n for n in range(2 * last, graph.batch + 1) if graph.batch % n == 0)
        yield last


def _one(graph: Graph, options: Options) -> int:
    """Refuse to cut a batch whose rows do not stand alone."""
    if options.micro_batches not in (None, 1):
        raise InputError(
            f"rows of {graph.name} do not stand alone in inference: a row's output is another one "
            f"where a batch of {graph.batch} is cut into {options.micro_batches} micro-batches",
            code="BX1253",
            help="use --micro-batches 1, and give example_batch() the rows of a batch",
        )
    return 1


def _taken(batch: int, cluster: Cluster, options: Options) -> list[int]:
    """Return the numbers of micro-batches that divide a batch and that the schedule takes.

    The schedule is asked as for a chain of all devices; of replicas, each with a chain of its own,
    not at all.
    """
    even = taken_counts(batch, None, 1)
    if traits(options.schedule).joins:  # two replicas in turn
        return [count for count in even if count % 2 == 0] or even
    if cluster.replicas or options.replicas not in (None, 1):
        return even
    return taken_counts(batch, options.schedule, len(cluster.devices)) or even


def _of_rows(batch: int, count: int, taken: Sequence[int]) -> str:
    """Say which numbers of micro-batches there are, and how rows are split unevenly."""
    said = f"use {micro_option(taken)}"
    if not 1 < count < batch:
        return said
    parts = [str(len(range(first, batch, count))) for first in range(count)]
    return (
        f"{said}; or let example_batch() have {batch + -batch % count} rows and the model file say "
        f"drop_last = False: batches of {batch} rows are then split as {' + '.join(parts[:8])}"
        f"{' + ...' if count > 8 else ''}, each row weighing the same"
    )


def placement_of(
    graph: Graph, cluster: Cluster, options: Options, micro_batches: int, costs: Costs
) -> Placement:
    """Ask the partitioner.

    Of devices that slow each other it receives the costs of ops while all compute, as most do in a
    pipeline. For a single micro-batch it receives the costs of each device alone.
    """
    concrete = graph.at(graph.batch // micro_batches)
    if micro_batches == 1 and costs.alone is not None:
        costs = costs.alone
    method = partitioner(options.partitioner, **_choices(options, micro_batches))
    read, seen = seen_by_planners(concrete, costs, options, micro_batches)
    told = replace(seen, cluster=for_tensors(seen.cluster, concrete, micro_batches))
    with redirect_stdout(sys.stderr):  # a user's own may print, and stdout may hold JSON alone
        return _partitioned(method, read, told, options)


def planned_as(place: Callable[[], Placement], make: Callable[[Placement], Plan]) -> Plan:
    """Make the plan of a partitioner's placement.

    Partitioners go by an upper bound of the memory of units, or by none. The nearest to what fits
    by this bound is tried: the ledger of the finished plan is exact, and decides.

    Raises:
        NoPlanError: it does not fit, with the ledger's arithmetic.
    """
    try:
        placement = place()
    except NoPlanError as error:
        if error.nearest is None:
            raise
        return _nearest(error, error.nearest, make)
    return make(placement)


def _nearest(
    refused: NoPlanError, homes: Mapping[str, str], make: Callable[[Placement], Plan]
) -> Plan:
    try:
        return make(Placement(homes, TIGHT))
    except InputError:
        raise refused from None
    except NoPlanError as exact:
        raise refused.told(*exact.notes) from None


def _partitioned(method: Partitioner, concrete: Graph, costs: Costs, options: Options) -> Placement:
    """Place a graph; where that fits only because some stages recompute, as if all of them did.

    The ops of the stages of some numbers are known only after the placement.
    """
    ask = partial(asked, method) if is_own(options.partitioner) else method.partition
    try:
        return ask(concrete, costs.cluster, costs)
    except NoPlanError:
        if not options.recompute or costs.recompute:
            raise
        return ask(concrete, costs.cluster, replace(costs, recompute=True))


def estimated(graph: Graph, cluster: Cluster, source: Source, name: str, members: int = 1) -> Costs:
    """Estimate a concrete graph, for the user's own optimizer; one rank's of a tensor group.

    Where devices of a host slow each other, ops are estimated twice: while all devices compute, and
    alone.
    """
    slowed, about = crowded(cluster), (source, name, members)
    costs = _estimated(graph, slowed, *about)
    if slowed is cluster:
        return costs
    return replace(costs, alone=_no_slower(_estimated(graph, cluster, *about), costs))


def _estimated(graph: Graph, cluster: Cluster, source: Source, name: str, members: int) -> Costs:
    judge = estimator(name)
    if members > 1 and isinstance(judge, GroupEstimator):
        judge = judge.of_group(members)
    return replace(
        judge.estimate(graph, cluster),
        optimizer_state_per_byte=source.optimizer_state,
        optimizer_temporaries=source.optimizer_temporaries,
        optimizer_leftover=source.optimizer_leftover,
        optimizer_states=source.optimizer_states,
        optimizer_at_once=source.optimizer_at_once,
    )


def _no_slower(alone: Costs, crowd: Costs) -> Costs:
    """Return costs alone, none above those in a crowd: each may rest on another profile."""

    def least(cost: OpCost, most: OpCost) -> OpCost:
        return replace(
            cost,
            forward_s=min(cost.forward_s, most.forward_s),
            backward_s=min(cost.backward_s, most.backward_s),
            backward_input_s=min(cost.backward_input_s, most.backward_input_s),
        )

    found: dict[int, Mapping[str, OpCost]] = {}  # devices of one kind have one table: keep it so
    for device, ops in alone.ops.items():
        if id(ops) not in found:
            known = crowd.ops[device]
            found[id(ops)] = {op: least(cost, known[op]) for op, cost in ops.items()}
    return replace(alone, ops={device: found[id(ops)] for device, ops in alone.ops.items()})


def _choices(options: Options, micro_batches: int) -> Mapping[str, object]:
    """Return what a partitioner can be told, of the fields that it has."""
    in_flight = micro_batches if options.schedule == "gpipe" else options.in_flight
    given: dict[str, object] = {"micro_batches": micro_batches, "in_flight": in_flight}
    if isinstance(options.partitioner, str):  # an object has been given a seed of its own
        given["seed"] = options.seed
    if options.cut_at is not None:
        given["block_gap"] = math.inf if options.cut_at == "blocks" else 0.0
    known = options_of("partitioner", options.partitioner)
    fields = {name: value for name, value in given.items() if name in known}
    return {**fields, **dict(options.partitioner_options)}


def _in_flight_of(options: Options, stages: Stages, keep: bool) -> tuple[int, ...] | None:
    """Return how many micro-batches are in flight, where that was said of so many devices."""
    fits = keep or len(options.in_flight or ()) == len(stages.devices)
    return options.in_flight if fits else None


def placed(
    case: Case,
    micro_batches: int,
    placement: Placement,
    costs: Costs,
    keep_schedule: bool = True,
    is_trial: bool = False,
) -> Plan:
    """Cut, schedule and simulate a placement; `costs` are of the rows of a micro-batch.

    Without `keep_schedule` choices of another placement that do not apply here are let go of.
    Programs of what `is_trial` are not checked: see `fitting`.

    Raises:
        NoPlanError: it does not fit in memory.
    """
    graph, cluster, source, options = case.graph, case.cluster, case.source, case.options
    rows, clip = graph.batch // micro_batches, source.clip_norm is not None
    placement = _broken(graph, placement, options, micro_batches, costs, keep_schedule)
    concrete = graph.at(rows)
    stages = cut_replicas(graph, placement, rows, clip=clip)
    with_backward = trained(graph, stages.stages)
    schedule = schedule_for(graph, stages, options, keep_schedule)
    how = Marking(graph, with_backward, options, micro_batches, schedule, keep_schedule)
    stages = marked(stages, how)
    stages = with_waiting_buckets(graph, placement, rows, stages, clip=clip)
    in_flight = _in_flight_of(options, stages, keep_schedule)

    def made(stages: Stages) -> tuple[tuple[Program, ...], Forecast]:
        stages = with_saved_in_stores(concrete, stages, costs, with_backward)
        per_stage = stage_costs(concrete, stages, costs)
        step = Step(concrete, stages, micro_batches, per_stage, with_backward, cluster, is_trial)
        return scheduled(step, schedule, in_flight)

    about = concrete, stages, costs, with_backward, options.recompute, micro_batches, made
    stages, programs, forecast = lightened(*about)
    stages = with_saved_in_stores(concrete, stages, costs, with_backward)
    if stages.asynchronous:
        forecast = in_a_row(programs, stages, stage_costs(concrete, stages, costs), forecast)
    require_fits(forecast, cluster, compiled=stages.compiled)
    require_capacity(forecast, cluster)
    return Plan(
        graph,
        cluster,
        source,
        label(options.partitioner),
        options.estimator,
        schedule,
        micro_batches,
        rows,
        options.seed,
        placement,
        stages,
        tuple(sorted(with_backward)),
        programs,
        forecast,
        in_flight=in_flight,
    )


def _broken(
    graph: Graph,
    placement: Placement,
    options: Options,
    micro_batches: int,
    costs: Costs,
    keep_schedule: bool,
) -> Placement:
    """Return a placement with the stages that its devices begin anew: for pieces, or by layers."""
    if keep_schedule:
        placement = in_pieces(graph, placement, options, micro_batches, costs)
    if "weights" in options.offload:
        placement = in_layers(graph, placement, graph.batch // micro_batches)
    return placement


def in_pieces(
    graph: Graph, placement: Placement, options: Options, micro_batches: int, costs: Costs
) -> Placement:
    """Give devices several pieces each, where the schedule that was asked for is of such."""
    is_cut = bool(placement.breaks or placement.replicas)  # of replicas, each by itself
    schedule = options.schedule
    if schedule is None or not traits(schedule).fold or is_cut:
        return placement
    seen = as_planners_see(costs, options.offload)
    return folded(graph, placement, seen, micro_batches, schedule, options.pieces)


def schedule_for(graph: Graph, stages: Stages, options: Options, keep_schedule: bool) -> str:
    """Return the schedule that was asked for where it goes with the stages; else one that does."""
    chain = "1f1b" if graph.training else "forward"
    schedule = options.schedule or (chain if stages.is_chain else "list")
    keeps = keep_schedule or "weights" in options.offload or traits(schedule).suits(stages)
    return schedule if keeps else "list"
