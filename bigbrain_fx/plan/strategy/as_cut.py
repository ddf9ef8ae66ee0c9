"""A plan, another number of micro-batches -> about its step, with all stages cut as they are.

    a replica's first micro-batch, stage by stage + each further one on its busiest device or link

By the difference to the plan's own number: sums of gradients and updates take the same in both. It
knows stages and what ops cost; it plans nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from bigbrain_fx.core import Costs, OpCost, Stage
from bigbrain_fx.plan.fastest import counted_s
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.process_clock import held_up


def as_cut_s(plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]) -> float:
    """Return about the step of a plan's stages, as comparisons count it.

    Args:
        plan: of replicas, whose devices compute alone.
        micro_batches: of a step, of all replicas together.
        costs_at: of the model's ops, at so many rows.
    """
    own_s = _pipelines_s(plan, plan.micro_batches, costs_at)
    return counted_s(plan) + _pipelines_s(plan, micro_batches, costs_at) - own_s


def _pipelines_s(plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]) -> float:
    """Return about the seconds of the slowest replica's forwards and backwards."""
    stages, times = plan.stages, micro_batches / plan.micro_batches
    first_s: dict[int, float] = defaultdict(float)
    busy_s: dict[int, dict[object, float]] = defaultdict(lambda: defaultdict(float))
    for replica, taken, seconds in _taken(plan, micro_batches, costs_at):
        first_s[replica] += seconds
        busy_s[replica][taken] += seconds
    return max(
        first_s[replica] + (len(micros) * times - 1) * max(busy_s[replica].values())
        for replica, micros in enumerate(stages.micros)
    )


def _taken(
    plan: Plan, micro_batches: int, costs_at: Callable[[int], Costs]
) -> list[tuple[int, object, float]]:
    """Return a micro-batch's seconds: of which replica, on which device or link, how long."""
    rows, stages = plan.graph.batch // micro_batches, plan.stages
    costs = costs_at(rows)
    ops = (held_up(costs) or costs).ops
    found: list[tuple[int, object, float]] = [
        (stage.replica, stage.device, _stage_s(stage, ops)) for stage in stages.stages
    ]
    for edge in stages.edges:
        if edge.kind in ("activation", "gradient") and not stages.is_local(edge):
            source, target = stages.stages[edge.source], stages.stages[edge.target]
            link = plan.cluster.wire(source.device, target.device)
            wire_s = link.wire_s(edge.nbytes * rows // plan.rows)
            found.append((source.replica, (source.device, target.device), wire_s))
    return found


def _stage_s(stage: Stage, ops: Mapping[str, Mapping[str, OpCost]]) -> float:
    own = ops[stage.device]
    return sum(own[op].forward_s + own[op].backward_s for op in stage.ops)
