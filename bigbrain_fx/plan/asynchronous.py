"""Pipelines that do not run empty between steps: what they do not go with, refused in words.

Which weights a step computes with is `runtime.asynchronous`'s to say, what a step takes in a row
`simulate`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Asynchronous, Cluster, Costs, Graph, Stage, Stages, micro_text
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.conflicts import Conflict, require_none, with_members
from bigbrain_fx.plan.fold import micro_option, taken_counts
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
from bigbrain_fx.plan.replica_statistics import written

SCHEDULE = "1f1b"
_INFERENCE = ("inference: nothing is trained there", "split for training")


def require_asynchronous_options(cluster: Cluster, options: Options) -> None:
    """Refuse what does not go with --asynchronous, whatever the model is."""
    if options.asynchronous is not None:
        require_none("--asynchronous", _not_with_options(cluster, options), code="BX1202")


def require_asynchronous(graph: Graph, source: Source, options: Options) -> None:
    """Refuse a model that does not go with --asynchronous, whatever the cut is."""
    if options.asynchronous is not None:
        require_none("--asynchronous", _not_with(graph, source, options), code="BX1203")


def _not_with(graph: Graph, source: Source, options: Options) -> Iterator[Conflict]:
    if graph.loss is None or not graph.training:
        yield _INFERENCE
    if source.clip_norm is not None:
        no_norm = "clip_norm: no global norm exists while other devices go on"
        yield no_norm, "take clip_norm out of the model file"
    if source.grad_scaler is not None:
        asks = "a loss scale: all devices would have to agree on each update"
        yield asks, "take grad_scaler out of the model file"
    if source.drop_last is False:
        few = "smaller last batches (drop_last = False)"
        yield few, "say drop_last = True in the model file"
    if options.asynchronous == "stash" and written(graph):
        said = f"what a forward writes ('{written(graph)[0]}'): its passes have unlike weights"
        yield said, "use --asynchronous 2bw, put the module into eval()"


def _not_with_options(cluster: Cluster, options: Options) -> Iterator[Conflict]:
    if options.mode == "eval":
        yield _INFERENCE
    if options.partitioner == AUTO:
        among = "--partitioner auto, which chooses among plans that compute the same"
        yield among, "name another partitioner (--partitioner analytical)"
    if options.replicas not in (None, 1) or options.replica_shares or cluster.replicas:
        named = 'take "replicas" out of the cluster file' if cluster.replicas else ""
        yield "replicas: stages would sum unlike versions", named or "leave --replicas out"
    if options.zero_stage or options.all_reduce_order != "replica":
        yield "--zero and --sum-order: they are for replicas", "leave both out"
    yield from with_members(options, "members would have unlike versions")
    if options.offload:
        yield "--offload: versions are in memory", "leave --offload out"
    if options.recompute:
        yield "--recompute yet", "leave --recompute out"
    if options.defer:
        yield "--defer: only gradients of whole backwards go on", "leave --defer out"
    if options.schedule not in (None, SCHEDULE):
        yield f"--schedule {options.schedule}", f"use --schedule {SCHEDULE}"
    if options.in_flight is not None:
        yield "in_flight: it has 1F1B's own", "leave in_flight out"


def overlapping(
    graph: Graph, stages: Stages, trained: frozenset[int], micro_batches: int, options: Options
) -> Stages:
    """Return stages whose steps overlap, where that was asked for.

    Raises:
        InputError: they are no pipeline of stages that are all trained apart from each other.
        NoPlanError: a step has too few micro-batches for so many stages.
    """
    if options.asynchronous is None:
        return stages
    require_pipeline(graph, stages, trained, options.asynchronous)
    count = len(stages.stages)
    if micro_batches < count:
        raise NoPlanError(
            f"--asynchronous needs as many micro-batches as stages: {micro_text(micro_batches)} "
            f"and {count} stages, so a step would run into the one after the next",
            code="BX1204",
            at="--asynchronous",
            help=_of_so_many(graph.batch, count),
        )
    return replace(stages, asynchronous=options.asynchronous)


def _of_so_many(batch: int, stages: int) -> str:
    """Say which micro-batches are as many as stages; rows of a batch may be too few for any."""
    enough = [count for count in taken_counts(batch, None, stages) if count >= stages]
    some = f"{micro_option(enough)}, or " if enough else ""
    return f"use {some}fewer devices"


def require_pipeline(
    graph: Graph, stages: Stages, trained: frozenset[int], wanted: Asynchronous
) -> None:
    """Refuse stages that are no such pipeline; see `overlapping`."""
    what = f"--asynchronous {wanted}"
    or_leave = "or leave --asynchronous out"
    if len(stages.stages) == 1:
        raise InputError(
            f"{what} lets steps of several devices overlap, and this plan has one device",
            code="BX1205",
            at="--asynchronous",
            help=f"use more devices, {or_leave}",
        )
    if not stages.is_chain:
        raise InputError(
            f"{what} needs one stage per device, and {len(stages.devices)} devices have "
            f"{len(stages.stages)} stages",
            code="BX1206",
            at="--asynchronous",
            help=f"use a partitioner that gives a line (--partitioner analytical), {or_leave}",
        )
    tied = next((edge.value for edge in stages.edges if edge.kind == "tied"), None)
    if tied is not None:
        raise InputError(
            f"{what} does not go with '{tied}', which several devices hold: each would have "
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
            f"{what} needs something to train on every device, and {idle[0].device} trains nothing",
            code="BX1208",
            at="--asynchronous",
            help=f"use fewer devices, --pin a trained module to it, {or_leave}",
        )
    if graph.loss not in stages.stages[-1].ops:
        raise InputError(
            f"{what} needs the loss on the last device of the line",
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


def with_versions(costs: Costs, options: Options, micro_batches: int) -> Costs:
    """Return costs with the versions that devices will hold, for those who place ops."""
    if options.asynchronous is None:
        return costs
    is_2bw = options.asynchronous == "2bw"
    more, updates = (1, 1) if is_2bw else (len(costs.cluster.devices) - 1, micro_batches)
    return replace(
        costs,
        optimizer_state_per_byte=costs.optimizer_state_per_byte + more,
        optimizer_s_per_byte={d: s * updates for d, s in costs.optimizer_s_per_byte.items()},
    )
