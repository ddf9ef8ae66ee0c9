"""Plan so that micro-batches train what the whole batch trains, or say what they train instead.

plan ──▶ step on the example batch, whole and in the plan's micro-batches
equal     ──▶ that plan
different ──▶ planned with one micro-batch, where their number was left open
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.errors import InputError, NoPlanError, about_code
from bigbrain_fx.frontend import MicroBatchEffect
from bigbrain_fx.plan import Options, Plan

Planned = tuple[Plan, tuple[str, ...]]


def planned_as_trained(
    found: FoundModel,
    options: Options,
    make: Callable[[FoundModel, Options], Planned],
    *,
    is_open: bool,
) -> Planned:
    """Plan; compare the plan's micro-batches with the whole batch.

    Args:
        found: the captured model.
        options: what was asked for.
        make: plans a model, and says what the user should know.
        is_open: whether another number of micro-batches may be planned with.

    Returns:
        The plan, and what the user should know.

    Raises:
        InputError: `loss_weight` is no count; or `drop_last` is False and the loss a sum over rows.
        BigBrainError: as `make` does.
    """
    plan, notes = make(found, options)
    if plan.mode != "train" or plan.micro_batches < 2:
        return plan, notes
    effect = found.compare(plan.micro_batches)
    if not effect.differs:
        _require_mean(plan, effect)
        return weighing(plan, effect), (*notes, *effect.unknown)
    fewer = _planned_with_one(found, options, make) if is_open else None
    if fewer is None or fewer[0].micro_batches >= plan.micro_batches:
        _require_mean(plan, effect)
        return plan, (*notes, effect.warning)
    return fewer[0], (*fewer[1], _note(fewer[0], plan, effect))


def _planned_with_one(
    found: FoundModel, options: Options, make: Callable[[FoundModel, Options], Planned]
) -> Planned | None:
    """Plan with one micro-batch; None where that goes with no plan: replicas, too little memory."""
    try:
        return make(found, replace(options, micro_batches=1))
    except (InputError, NoPlanError):
        return None


def weighing(plan: Plan, effect: MicroBatchEffect) -> Plan:
    """Return a plan with how its micro-batches weigh, as a comparison found it."""
    source = replace(plan.source, divided=effect.divided)
    if effect.loss_count is not None and not source.has_loss_weight:
        source = replace(source, loss_count=effect.loss_count)
    return replace(plan, source=source)


def _require_mean(plan: Plan, effect: MicroBatchEffect) -> None:
    """Refuse unequal micro-batches of a loss that is a sum over rows."""
    if effect.is_sum and plan.source.drop_last is False:
        with about_code():
            raise InputError(
                "a batch has fewer rows, and the loss is a sum over rows: micro-batches that weigh "
                "their rows would count them twice",
                code="BX3159",
                help="divide it by the rows in loss(), as with .mean(); or drop_last = True",
            )


def _note(plan: Plan, other: Plan, effect: MicroBatchEffect) -> str:
    own, more = plan.forecast.step_s, other.forecast.step_s
    verb = "may train" if effect.not_compared else "train"
    return (
        f"planned with one micro-batch, {own:.4g} s a step: {effect.micro_batches} would take "
        f"{more:.4g} s and {verb} something else ({effect.difference}). {effect.cause}. "
        f"{effect.remedy + '. ' if effect.remedy else ''}"
        f"--micro-batches {effect.micro_batches} takes them all the same"
    )
