"""Effects of options on stages, feature by feature: views of partitioners, marks of stages.

    options ──seen──▶ costs and graph that a partitioner gets
            ──mark──▶ stages that say how they run
    plan ────asked──▶ options that give such stages again, of another cut

Plans are made by loops over `FEATURES`. `compatibility` has the incompatible features, `Plan.said`
their sentences, and `schedule.memory` the memory of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigbrain_fx.core import (
    Asynchronous,
    Cluster,
    Costs,
    Graph,
    Param,
    Stage,
    Stages,
    micro_text,
    quantised_weights,
)
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fold import micro_option, taken_counts
from bigbrain_fx.plan.memory_check import beside_compiler
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.offloading import as_planners_read, as_planners_see
from bigbrain_fx.plan.recompute import defer_of, deferring, recomputing, wanted_by
from bigbrain_fx.plan.schedule import traits


@dataclass(frozen=True)
class Seen:
    """A partitioner's view: a micro-batch's graph and costs, and the micro-batches of a step."""

    graph: Graph
    costs: Costs
    options: Options
    micro_batches: int


@dataclass(frozen=True)
class Marking:
    """Origin and purpose of stages.

    Attributes:
        trained: stages with a backward.
        schedule: that will run them.
        is_kept: whether options are of these stages; else options that do not apply are dropped.
    """

    graph: Graph
    trained: frozenset[int]
    options: Options
    micro_batches: int
    schedule: str
    is_kept: bool


@dataclass(frozen=True)
class StageFeature:
    """Something that stages may do besides computing their ops.

    Attributes:
        mark: stages -> stages that say that they do it, where it was asked for.
        asked: plan, cluster -> the option that asks for what its stages do, there.
        seen: what a partitioner receives -> the same where stages will do it.
    """

    mark: Callable[[Stages, Marking], Stages]
    asked: Callable[[Plan, Cluster], Mapping[str, Any]]
    seen: Callable[[Seen], Seen] = lambda seen: seen


def seen_by_planners(
    graph: Graph, costs: Costs, options: Options, micro_batches: int
) -> tuple[Graph, Costs]:
    """Return a micro-batch's graph and its costs as a partitioner receives them."""
    seen = Seen(graph, costs, options, micro_batches)
    for feature in FEATURES:
        seen = feature.seen(seen)
    return seen.graph, seen.costs


def marked(stages: Stages, how: Marking) -> Stages:
    """Return stages with all that options say of how they run.

    Raises:
        InputError: such stages cannot.
        NoPlanError: so many micro-batches cannot.
    """
    for feature in FEATURES:
        stages = feature.mark(stages, how)
    return stages


def asked_again(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return the options that ask for what a plan's stages do, of another cut or cluster."""
    return {name: each for f in FEATURES for name, each in f.asked(plan, cluster).items()}


def options_again(plan: Plan) -> Options:
    """Return the options that make a plan of another placement on the same cluster."""
    return Options(
        plan.partitioner,
        plan.estimator,
        plan.schedule,
        plan.micro_batches,
        plan.seed,
        plan.in_flight,
        **asked_again(plan, plan.cluster),
    )


# ------------------------------------------------------------- stores, recompute, split backwards


def _seen_in_stores(seen: Seen) -> Seen:
    graph = as_planners_read(seen.graph, seen.options.offload)
    return replace(seen, graph=graph, costs=as_planners_see(seen.costs, seen.options.offload))


def _offloaded(plan: Plan, cluster: Cluster) -> Mapping[str, Any]:
    has_stores = all(device.name in cluster.store for device in cluster.devices)
    return {"offload": plan.stages.offload if has_stores else ()}


def _seen_beside_compiler(seen: Seen) -> Seen:
    left = beside_compiler(seen.costs.cluster, compiled=seen.options.compiled)
    return replace(seen, costs=replace(seen.costs, cluster=left))


def _seen_again(seen: Seen) -> Seen:
    return replace(seen, costs=replace(seen.costs, recompute=seen.options.recompute == "all"))


def _run_again(stages: Stages, how: Marking) -> Stages:
    asked, is_lenient = how.options.recompute, not how.is_kept
    return recomputing(how.graph, stages, how.trained, asked, lenient=is_lenient)


def _recomputed(plan: Plan, _: Cluster) -> Mapping[str, Any]:
    """Return what was asked to run again; float weights of int8 ones do so unasked."""
    wide = frozenset(widening(plan.graph))
    own, trained = _of_first(plan)
    asked = (replace(s, again=tuple(n for n in s.again if n not in wide)) for s in own)
    return {"recompute": wanted_by(replace(plan.stages, stages=tuple(asked)), trained)}


def _of_first(plan: Plan) -> tuple[tuple[Stage, ...], list[int]]:
    """Return a group's first rank's stages, and those trained: the others do the same."""
    own = plan.stages.of_member(0)
    return own, [number for number in plan.trained if number < len(own)]


def _wait(stages: Stages, how: Marking) -> Stages:
    """Mark what was asked for; unasked all, where the schedule is made for it."""
    asked, is_lenient = how.options.defer, not how.is_kept
    wanted = "all" if asked is None and traits(how.schedule).splits else asked
    return deferring(how.graph, stages, how.trained, wanted, lenient=is_lenient)


def _deferred(plan: Plan, _: Cluster) -> Mapping[str, Any]:
    own, trained = _of_first(plan)
    return {"defer": defer_of(replace(plan.stages, stages=own), trained)}


# ------------------------------------------------------------------------- steps that overlap
#
# Which weights a step computes with is `runtime.asynchronous`'s to say, what a step takes in a row
# `simulate`'s.


def _seen_versions(seen: Seen) -> Seen:
    """Count the versions of weights that devices will hold."""
    costs, mode, micro = seen.costs, seen.options.asynchronous, seen.micro_batches
    if mode is None:
        return seen
    more, updates = (1, 1) if mode == "2bw" else (len(costs.cluster.devices) - 1, micro)
    versions = replace(
        costs,
        optimizer_state_per_byte=costs.optimizer_state_per_byte + more,
        optimizer_s_per_byte={d: s * updates for d, s in costs.optimizer_s_per_byte.items()},
    )
    return replace(seen, costs=versions)


def _overlap(stages: Stages, how: Marking) -> Stages:
    """Mark stages whose steps overlap, where they are a pipeline that can.

    Raises:
        InputError: they are no pipeline of stages that are all trained apart from each other.
        NoPlanError: a step has too few micro-batches for so many stages.
    """
    mode, count = how.options.asynchronous, len(stages.stages)
    if mode is None:
        return stages
    require_pipeline(how.graph, stages, how.trained, mode)
    if how.micro_batches < count:
        raise NoPlanError(
            "--asynchronous needs as many micro-batches as stages: "
            f"{micro_text(how.micro_batches)} and {count} stages, so a step would run into the "
            "one after the next",
            code="BX1204",
            at="--asynchronous",
            help=_of_so_many(how.graph.batch, count),
        )
    return replace(stages, asynchronous=mode)


def _of_so_many(batch: int, stages: int) -> str:
    """Say which micro-batches are as many as stages; rows of a batch may be too few for any."""
    enough = [count for count in taken_counts(batch, None, stages) if count >= stages]
    some = f"{micro_option(enough)}, or " if enough else ""
    return f"use {some}fewer devices"


def require_pipeline(
    graph: Graph, stages: Stages, trained: frozenset[int], wanted: Asynchronous
) -> None:
    """Refuse stages that are no such pipeline; see `Overlap`."""
    mode = f"--asynchronous {wanted}"
    or_leave = "or leave --asynchronous out"
    if len(stages.stages) == 1:
        raise InputError(
            f"{mode} lets steps of several devices overlap, and this plan has one device",
            code="BX1205",
            at="--asynchronous",
            help=f"use more devices, {or_leave}",
        )
    if not stages.is_chain:
        raise InputError(
            f"{mode} needs one stage per device, and {len(stages.devices)} devices have "
            f"{len(stages.stages)} stages",
            code="BX1206",
            at="--asynchronous",
            help=f"use a partitioner that gives a line (--partitioner analytical), {or_leave}",
        )
    tied = next((edge.value for edge in stages.edges if edge.kind == "tied"), None)
    if tied is not None:
        raise InputError(
            f"{mode} does not go with '{tied}', which several devices hold: each would have "
            "another version of it",
            code="BX1207",
            at="--asynchronous",
            help=f"untie it in the model file, use fewer devices, {or_leave}",
        )
    idle = [
        stage for stage in stages.stages if stage.index not in trained or not _has(graph, stage)
    ]
    if idle:
        raise InputError(
            f"{mode} needs something to train on every device, and {idle[0].device} trains nothing",
            code="BX1208",
            at="--asynchronous",
            help=f"use fewer devices, --pin a trained module to it, {or_leave}",
        )
    if graph.loss not in stages.stages[-1].ops:
        raise InputError(
            f"{mode} needs the loss on the last device of the line",
            code="BX1209",
            at="--asynchronous",
            help=f"--pin the model's last modules to {stages.stages[-1].device}, {or_leave}",
        )


def require_no_overlap(plan: Plan, what: str, help_: str) -> None:
    """Refuse for a plan whose steps overlap what would leave its older weights behind."""
    if plan.stages.asynchronous:
        raise InputError(
            f"{what} does not go with --asynchronous yet: which weights a step computes with is "
            "said for these devices",
            code="BX1210",
            help=help_,
        )


def _has(graph: Graph, stage: Stage) -> bool:
    """Whether a stage has something to train."""
    return any(graph.param[name].is_trained for name in stage.params)


# ------------------------------------------------------------------------- a frozen base in int8
#
# A layer computes with `weight * weight_scale`, of which autograd would keep a float copy for each
# layer and micro-batch: it is made again for the backward. The frontend rounds.


def _widen_again(stages: Stages, how: Marking) -> Stages:
    """Mark backwards that make float weights of int8 ones again."""
    wide = frozenset(widening(how.graph)) if how.graph.training else frozenset()

    def one(stage: Stage) -> Stage:
        if stage.index not in how.trained or stage.runs_again or stage.deferred:
            return stage
        return replace(stage, again=tuple(name for name in stage.ops if name in wide))

    return replace(stages, stages=tuple(map(one, stages.stages))) if wide else stages


def widening(graph: Graph) -> Iterator[str]:
    """Yield the ops that make a float weight of an int8 one and its scale."""
    rounded = {weight: f"{weight}_scale" for weight in quantised_weights(graph)}
    for op in graph.ops:
        if any(op.params == (weight, rounded.get(weight)) for weight in op.params[:1]):
            yield op.name


def plain_params(graph: Graph) -> list[Param]:
    """Return the parameters and buffers that the user's model has, too, with these numbers."""
    names = {name for n in quantised_weights(graph) for name in (n, f"{n}_scale")}
    return [param for param in graph.params if param.name not in names]


def require_float(plan: Plan, what: str) -> None:
    """Refuse to put float weights into a bundle whose frozen ones are int8."""
    if plan.source.quantize:
        raise InputError(
            f"{what}: frozen weights of this bundle are {plan.source.quantize}, and those would "
            "have to be rounded, too",
            code="BX1259",
            help="load them in the model file's model(), and split it again with --quantize",
        )


# ------------------------------------------------------------------------- all of them

FEATURES: tuple[StageFeature, ...] = (
    StageFeature(
        lambda stages, how: replace(stages, offload=how.options.offload),
        _offloaded,
        _seen_in_stores,
    ),
    StageFeature(
        _overlap,
        lambda plan, _: {"asynchronous": plan.stages.asynchronous},
        _seen_versions,
    ),
    StageFeature(
        lambda stages, how: replace(stages, compiled=how.options.compiled),
        lambda plan, _: {"compiled": plan.stages.compiled},
        _seen_beside_compiler,
    ),
    StageFeature(_run_again, _recomputed, _seen_again),
    StageFeature(_wait, _deferred),
    StageFeature(_widen_again, lambda plan, _: {}),
)
"""In the order in which stages are marked: a later one may go by what an earlier one has said."""
