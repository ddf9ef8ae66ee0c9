"""The last link: a step on the whole example batch = the same step in the plan's micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Captured,
    MicroBatchEffect,
    ModelFile,
    Training,
    effect_of_parts,
    micro_batch_effect,
    with_divided,
)
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import left_alone

NAME = "whole batch = micro-batches"


def same_objective(file: ModelFile, captured: Captured, plan: Plan) -> list[dict[str, object]]:
    """Compare loss and gradients by plain PyTorch; no link where there is one micro-batch.

    A difference fails nothing: whoever split the model was warned of it, and the bundle computes
    what was asked for.
    """
    if plan.micro_batches < 2:
        return []
    if file.parts > 1:
        with left_alone(file.batches):
            later = next(islice(file.batches(plan.seed), 1, None)) if file.batches else None
        return [_check(effect_of_parts(file, file.whole_batch if later is None else later))]
    found = plan.source.loss_count
    weight = file.loss_weight or (found.of if found is not None else None)
    batch = with_divided(captured.batch, plan.source.divided)
    captured = replace(captured, batch=batch)
    training = Training(file.model, file.loss, file.autocast, weight)
    try:
        effect = micro_batch_effect(training, captured, plan.micro_batches)
    except InputError as error:  # a loss_weight that no longer counts
        return [{"name": NAME, "passed": None, "detail": error.what}]
    return [_check(effect)]


def _check(effect: MicroBatchEffect) -> dict[str, object]:
    if effect.differs:
        return {"name": NAME, "passed": None, "warns": True, "detail": effect.warning}
    if effect.not_compared:
        return {"name": NAME, "passed": None, "detail": effect.not_compared}
    return {"name": NAME, "passed": True, "rounded": True, "detail": effect.difference}
