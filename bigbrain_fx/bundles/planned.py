"""A captured model -> its plan, and what the user should know of it.

Graph ─▶ partitioner, or another plan to follow ─▶ rules and optimizer tried ─▶ micro-batches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bigbrain_fx.bundles.found import (
    require_first_batches,
    require_optimizer,
    with_seeded_file,
    with_tried_rules,
)
from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.bundles.micro_batches import planned_as_trained
from bigbrain_fx.bundles.opaque import planned_whole
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import told_of_gpus
from bigbrain_fx.plan import (
    Options,
    Plan,
    group_warnings,
    half_sums_text,
    place_like,
    plan_or_remedy,
    plan_placed,
    traits,
    turned_text,
)


def planned(
    found: FoundModel,
    options: Options,
    cluster: Cluster,
    followed: Plan | None,
    refusal: BigBrainError | None,
) -> tuple[Plan, tuple[str, ...]]:
    """Plan a captured model; return what the user should know, too."""
    gpus = [device.name for device in cluster.devices if device.kind == "cuda"]
    there = told_of_gpus(found.device_lines, gpus)
    make = partial(_said_plan, make=partial(tried_plan, cluster=cluster, followed=followed))
    if refusal is not None:
        return planned_whole(found, options, make, refusal)
    is_open = options.micro_batches is None and followed is None
    plan, said = planned_as_trained(found, options, make, is_open=is_open)
    require_first_batches(found, plan)
    return with_seeded_file(found, plan), (*there, *said)


def _said_plan(
    found: FoundModel,
    options: Options,
    make: Callable[[FoundModel, Options], tuple[Plan, tuple[str, ...]]],
) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan, and what the user should know of it; its optimizer was tried."""
    plan, kept = make(found, options)
    notes = (
        *half_sums_text(plan.graph, plan.stages),
        *turned_text(plan.graph, plan.stages, plan.sharded.members),
    )
    return plan, (
        *found.warnings,
        *kept,
        *group_warnings(plan),
        *require_optimizer(found, plan),
        *notes,
    )


def tried_plan(
    found: FoundModel, options: Options, cluster: Cluster, followed: Plan | None
) -> tuple[Plan, tuple[str, ...]]:
    """Plan a model, with rules of tensor groups tried; say what the user should know."""
    return with_tried_rules(found, options, lambda own: _plan(found, cluster, own, followed))


def _plan(found: FoundModel, cluster: Cluster, options: Options, followed: Plan | None) -> Plan:
    """Plan as asked: with a partitioner, or as another plan placed the same model."""
    if followed is None:
        return plan_or_remedy(found.graph, cluster, found.source, options)
    _require_one_replica(found.graph, options, followed)
    same = followed.micro_batches
    fits = found.graph.static_batch is None and found.graph.batch % same == 0
    count = options.micro_batches or (same if fits else None)
    alike = replace(options, partitioner=followed.partitioner, micro_batches=count)
    placement = place_like(found.graph, followed)
    return plan_placed(found.graph, cluster, found.source, alike, placement)


def _require_one_replica(graph: Graph, options: Options, followed: Plan) -> None:
    """Refuse replicas where ops are placed as another plan has them: shares are not in it."""
    asked = (options.replicas or 1) > 1 or options.replica_shares or options.zero_stage
    if asked or options.all_reduce_order != "replica" or traits(options.schedule).joins:
        raise InputError(
            "--like places one replica, as another plan did",
            code="BX3019",
            help="leave --like out, or --replicas, --replica-ratio, --zero, --all-reduce-order and "
            "--schedule gems",
        )
    if graph.training and followed.stages.micros:
        raise InputError(
            f"the plan to follow has {followed.stages.replicas} replicas, which --like does not "
            "make again",
            code="BX3020",
            help=f"split with --replicas {followed.stages.replicas}, or --mode eval --like to "
            "infer as the first replica",
        )
