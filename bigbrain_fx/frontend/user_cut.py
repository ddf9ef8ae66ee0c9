"""Model files with their own `micro(batch, parts)`: a part is the trace's batch.

    example batch ─▶ micro(batch, 4) ─▶ part 0 is traced, in its own shapes; the plan has four

Batch and parts are compared as plain PyTorch, loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigbrain_fx.core import ROW_COUNTS
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.micro_batches.comparison import (
    GRADIENT_TOLERANCE,
    LATER_S,
    LOSS_TOLERANCE,
    spread,
)
from bigbrain_fx.frontend.micro_batches.draws import Draws
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import (
    StepGradients,
    Tensors,
    Trainee,
    difference,
    even,
    summed,
)
from bigbrain_fx.frontend.micro_batches.loss_count import number_of_count
from bigbrain_fx.frontend.plain_entries import with_numbers
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Step, route
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.frontend.users_code import definition
from bigbrain_fx.runtime import BatchError, parts_of

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

_WEIGH = (
    "Where the loss is a mean over what the parts have unequally many of, let them weigh by it: "
    "def loss_weight(batch)"
)


def cut(file: ModelFile, batch: object, count: int) -> list[object]:
    """Return the parts into which the file cuts a batch.

    Raises:
        InputError: their number is wrong, or they differ in shapes; or `micro` fails.
    """
    assert file.micro is not None
    try:
        return parts_of(file.micro, batch, count, 0)
    except BatchError as error:
        what, _, remedy = str(error).removeprefix("step 0: ").rpartition(": ")
        raise InputError(
            what, code="BX2199", at=definition(file.micro, file.path), help=remedy
        ) from error


def with_parts(file: ModelFile, count: int) -> ModelFile:
    """Return a model file with the first of so many parts as its example.

    Raises:
        InputError: as `cut`; or the file has no data to cut.
    """
    if file.micro is None:
        return file
    if file.batches is None and not file.is_data:
        raise InputError(
            "the file has `micro`, which cuts batches, and no `batches`",
            code="BX2200",
            at=definition(file.micro, file.path),
            help="def batches(seed): while True: yield example_batch()",
        )
    if count == 1:
        return replace(file, parts=1, whole_batch=file.example_batch)
    parts = cut(file, file.example_batch, count)
    return replace(file, parts=count, whole_batch=file.example_batch, example_batch=parts[0])


def part_counts(function: Callable[[Any], object], part: object) -> dict[str, Tensor]:
    """Return the entry with the weight of a part, for devices that cannot count.

    Raises:
        InputError: it is no number, negative, NaN or infinite.
    """
    return {ROW_COUNTS: torch.tensor([number_of_count(function(part))], dtype=torch.float64)}


def as_traced(file: ModelFile, batch: object) -> object:
    """Return the trace's part of a batch: the first one, with tensors for its numbers."""
    own = cut(file, batch, file.parts)[0] if file.parts > 1 else batch
    return with_numbers(own, file.numbers)


def effect_of_parts(file: ModelFile, later: Sequence[object]) -> MicroBatchEffect:
    """Compare a step on the whole batch with one on its parts; then on weights that have moved.

    Args:
        file: with a part as its example.
        later: other batches of its data; they are compared for a second.

    Raises:
        InputError: `loss_weight` gives no number for a part; or parts differ in shapes.
    """
    nothing = MicroBatchEffect(file.parts, file.parts)
    try:
        effect, first, trainee = _compared(file, file.whole_batch, nothing)
        if effect.differs or not first.is_finite:
            return effect
        with trainee.moved(first):
            again = _first_apart(file, later or [file.whole_batch], nothing)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        text = (str(error).splitlines() or [""])[0]
        return replace(nothing, not_compared=f"{type(error).__name__}: {text[:200]}")
    return effect if again is None else replace(again, after_steps=True)


def _first_apart(
    file: ModelFile, batches: Sequence[object], nothing: MicroBatchEffect
) -> MicroBatchEffect | None:
    """Return the effect of the first of some batches that differs from its parts."""
    is_over = budget(LATER_S)
    for number, batch in enumerate(spread(batches)):
        if number and is_over():
            return None
        found = _compared(file, batch, nothing)[0]
        if found.differs:
            return found
    return None


def _compared(
    file: ModelFile, batch: object, nothing: MicroBatchEffect
) -> tuple[MicroBatchEffect, StepGradients, Trainee]:
    parts = cut(file, batch, file.parts)
    shares = _shares(file, parts)
    draws = Draws()  # parts may have any rows
    trainee, tensors = _trainee(file, batch, draws)
    whole = trainee.step(tensors)
    steps = (_trainee(file, part, draws) for part in parts)
    pairs = zip(steps, shares, strict=True)
    found = [step for (own, given), share in pairs for step in own.parts([given], [share])]
    total = summed(found, shares, len(trainee.names))
    off = difference(whole, total, trainee.names)
    effect = replace(
        nothing,
        is_equal=off.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE),
        whole_loss=whole.loss,
        parts_loss=total.loss,
        gradient_error=off.gradient,
        parameter=off.parameter,
        parameter_error=off.parameter_gradient,
    )
    if effect.is_equal:
        return effect, whole, trainee
    cause = "The parts that micro(batch, parts) cuts do not add up to the batch"
    remedy = "" if file.loss_weight else _WEIGH
    return replace(effect, cause=cause, remedy=remedy), whole, trainee


def _trainee(file: ModelFile, batch: object, draws: Draws) -> tuple[Trainee, Tensors]:
    apart = take_apart(with_numbers(batch, file.numbers))
    how = route(file.model, batch, file.loss is not None)
    step = Step(file.model, file.loss, apart, how)
    trainee = Trainee(Plain(step, file.model, file.autocast), draws=draws)
    return trainee, {entry.name: entry.tensor for entry in apart.entries}


def _shares(file: ModelFile, parts: Sequence[object]) -> list[float]:
    if file.loss_weight is None:
        return even(len(parts))
    counts = [number_of_count(file.loss_weight(part)) for part in parts]
    if not sum(counts) > 0:
        raise InputError(
            "loss_weight is 0 for every part of the batch: nothing would be trained on",
            code="BX2201",
            at=definition(file.loss_weight, file.path),
            help="count what the loss is a mean over",
        )
    return [count / sum(counts) for count in counts]
