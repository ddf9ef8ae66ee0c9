"""The links of the chain from the user's loop to its bundle: each compares two runs.

    plain loop = captured graph = reference = bundle

It runs what it is given; what is compared in which order, `child` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Captured,
    MicroBatchEffect,
    ModelFile,
    Training,
    allowed,
    effect_of_parts,
    further_batches,
    micro_batch_effect,
    same_numbers,
    unit_of,
    with_divided,
)
from bigbrain_fx.plan import Plan, half_sums, half_sums_text, turned_text
from bigbrain_fx.verification.imported_bundle import weights_of
from bigbrain_fx.verification.loop import PlainLoop, lacking, plain_loop
from bigbrain_fx.verification.plain import Own, not_run, plain_link
from bigbrain_fx.verification.reference import Reference
from bigbrain_fx.verification.trace import (
    Trace,
    left_of_zero,
    link as _check,
    relative_error,
    same_run,
)
from bigbrain_fx.weights import part_name, trained_steps


def same_loop(
    plain: PlainLoop | None,
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    own: Own | None,
    steps: int,
) -> dict[str, object]:
    """Compare the user's own loop in plain PyTorch with the captured graph."""
    if plain is not None:
        return plain_link(plain, file, captured, plan, own, steps)
    reason = lacking(plan)
    if reason:
        return not_run(reason)
    with plain_loop(plan, folder, file.location, weights_of) as loop:
        assert loop is not None
        return plain_link(loop, file, captured, plan, own, steps)


def same_weights(
    captured: Captured, weights: Mapping[str, Tensor], plan: Plan, folder: Path
) -> dict[str, object]:
    """Compare weights; those of a run that was moved with names and shapes only."""
    steps = trained_steps(folder / "weights")
    param = plan.graph.param
    held = {param[name].canonical for stage in plan.stages.stages for name in stage.params}
    used = [name for name in captured.tensors if name in param and param[name].canonical in held]
    if steps is not None:
        found = [
            f"{name} has another shape or type than in the model"
            for name in used
            if captured.tensors[name].shape != weights[name].shape
            or captured.tensors[name].dtype != weights[name].dtype
        ]
        what = f"{len(used)} names, shapes, types; the numbers are those of step {steps} of a run"
        return _check("weights fit your model", found, what)
    found = [
        f"{name} has other numbers than the model"
        for name in used
        if captured.tensors[name].shape != weights[name].shape
        or not same_numbers(weights[name], captured.tensors[name].detach())
    ]
    return _check("weights = your model's", found, f"{len(used)} tensors bitwise")


def same_grouping(
    reference: Reference, plain: Reference, micro_batches: Sequence[Mapping[str, Tensor]], seed: int
) -> dict[str, object]:
    """Compare gradients of the graph as one process adds them with those of stages."""
    _, expected = plain.gradients(list(micro_batches), seed, 0)
    _, actual = reference.gradients(list(micro_batches), seed, 0)
    unit, coarse = unit_of(plain.graph, plain.tensors), {*half_sums(plain.graph, plain.stages)}
    zero = left_of_zero(expected, actual, unit)
    errors = {n: relative_error(actual.get(n), g) for n, g in expected.items() if n not in zero}
    limits = {n: allowed(unit if n in coarse else 0) for n in errors}
    found = [f"gradient of {n} differs by {e:.1e}" for n, e in errors.items() if e > limits[n]]
    worst = f"largest difference {max(errors.values(), default=0.0):.1e} of a tensor's maximum"
    most = f"(allowed {max(limits.values(), default=0.0):g})"
    rounded = (*half_sums_text(plain.graph, plain.stages), *turned_text(plain.graph, plain.stages))
    tiny = [f"{len(zero)} that rounding leaves of a zero not compared"] * bool(zero)
    said = "; ".join((f"{worst} {most}", *tiny, *rounded))
    return _check("captured graph = reference", found, f"{len(errors)} gradients of step 0, {said}")


def same_training(plan: Plan, expected: Trace, actual: Trace) -> list[dict[str, object]]:
    """Compare two training runs: losses, gradients of step 0, tensors at the end; three checks."""
    parts = {(s.param, s.member) for s in plan.sharded.shards}
    held = {(p, s.member) for s in plan.stages.stages for p in s.params}
    stored = {part_name(*each) if each in parts else each[0] for each in held}
    checks = same_run("reference = bundle", expected, actual, stored)
    return [_unless_left_out(check, expected) for check in checks]


def _unless_left_out(check: dict[str, object], expected: Trace) -> dict[str, object]:
    """Say "not run" of a link that holds because a loss scale left out what it would compare."""
    first, every = 0 in expected.left_out, len(expected.left_out) == len(expected.losses)
    nothing = (every and "weights" in str(check["name"])) or (
        first and "gradients" in str(check["name"])
    )
    if not nothing or not check["passed"]:
        return check
    what = "all updates" if every else "the update of step 0"
    detail = f"the loss scale left out {what}: give grad_scaler a smaller init_scale to compare it"
    return {**check, "passed": None, "detail": detail}


WHOLE_BATCH = "whole batch = micro-batches"


def same_objective(file: ModelFile, captured: Captured, plan: Plan) -> list[dict[str, object]]:
    """Compare loss and gradients by plain PyTorch; no link where there is one micro-batch.

    A difference fails nothing: `split` warned of it, and the bundle computes what was asked for.
    """
    if plan.micro_batches < 2:
        return []
    later = partial(further_batches, file, plan.seed)
    if file.parts > 1:
        return [_of_effect(effect_of_parts(file, later()))]
    found = plan.source.loss_count
    weight = file.loss_weight or (found.of if found is not None else None)
    batch = with_divided(captured.batch, plan.source.divided)
    captured = replace(captured, batch=batch)
    training = Training(file.model, file.loss, file.autocast, weight, later)
    try:
        effect = micro_batch_effect(training, captured, plan.micro_batches)
    except InputError as error:  # a loss_weight that no longer counts
        return [{"name": WHOLE_BATCH, "passed": None, "detail": error.what}]
    return [_of_effect(effect)]


def _of_effect(effect: MicroBatchEffect) -> dict[str, object]:
    if effect.differs:
        return {"name": WHOLE_BATCH, "passed": None, "warns": True, "detail": effect.warning}
    if effect.not_compared:
        return {"name": WHOLE_BATCH, "passed": None, "detail": effect.not_compared}
    return {"name": WHOLE_BATCH, "passed": True, "rounded": True, "detail": effect.difference}
