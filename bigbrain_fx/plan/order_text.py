"""Why devices compute in this order: what was found, and how near the bound it is."""

from __future__ import annotations

from bigbrain_fx.core import Backward, BackwardWeight, Costs, Forward, Instruction
from bigbrain_fx.plan.fitting import Step, room_of
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.schedule import (
    Synthesised,
    goes_in_row,
    stage_costs,
    traits,
    virtual_stages,
)
from bigbrain_fx.planning import JobOf, Kind, OrderClock, Synthesis, VirtualStages, bound_s


def order_text(plan: Plan, costs: Costs) -> str:
    """Say it of a schedule of virtual stages, or one that was searched; nothing of others."""
    own = traits(plan.schedule)
    if not (own.searches or own.fold) or plan.mode != "train" or plan.stages.micros:
        return ""
    if plan.placement.tensor is not None:  # `costs` are of all members, and they run one order
        return ""
    concrete, trained = plan.graph.at(plan.rows), frozenset(plan.trained)
    per_stage = stage_costs(concrete, plan.stages, costs)
    step = Step(concrete, plan.stages, plan.micro_batches, per_stage, trained, plan.cluster)
    given = virtual_stages(plan.stages, plan.micro_batches, per_stage, trained)
    found = None
    if own.searches:
        search = Synthesised(room_bytes=room_of(step, plan.schedule))
        found = search.found(plan.stages, plan.micro_batches, per_stage, trained)
    return _said(plan, given, found)


def _said(plan: Plan, given: VirtualStages, found: Synthesis | None) -> str:
    in_row = goes_in_row(plan.stages)
    clock = OrderClock(given)
    row_s, alone_s = clock.row_s(clock.numbered(_jobs(plan)))
    least_s = bound_s(given, in_row=in_row)
    why = "in a row, since nothing is clipped" if in_row else "alone, since gradients are clipped"
    gap = (row_s if in_row else alone_s) / least_s - 1 if least_s else 0.0
    lines = [
        f"order: {plan.schedule}{_start(found)}; a step alone takes {alone_s:.4g} s, one more in a "
        f"row {row_s:.4g} s",
        f"  what counts is a step {why}: no order of these stages takes less than {least_s:.4g} s, "
        f"this one {gap:.1%} more",
    ]
    return "\n".join(lines)


def _start(found: Synthesis | None) -> str:
    if found is None:
        return ""
    kept = "a list schedule" if found.start == "list" else found.start
    return f", {kept}, the best that was found under the devices' memory"


def _jobs(plan: Plan) -> dict[int, list[JobOf]]:
    """Return the plan's own orders as the planning kernel has them."""
    return {
        place: [job for i in program.instructions for job in _job(i)]
        for place, program in enumerate(plan.programs)
    }


def _job(instruction: Instruction) -> list[JobOf]:
    match instruction:
        case Forward(stage, micro):
            return [(Kind.FORWARD, stage, micro)]
        case Backward(stage, micro):
            return [(Kind.BACKWARD, stage, micro)]
        case BackwardWeight(stage, micro):
            return [(Kind.BACKWARD_WEIGHT, stage, micro)]
    return []
