"""Pipelines that do not run empty between steps: the stages and costs of one.

Which weights a step computes with is `runtime.asynchronous`'s to say, what a step takes in a row
`simulate`'s.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Asynchronous, Costs, Graph, Stage, Stages, micro_text
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fold import micro_option, taken_counts
from bigbrain_fx.plan.nouns import Options, Plan


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
