"""Measure the effect of micro-batches on one captured model: the entry point of this package.

model that can be run     ─▶ loss and gradients, whole and in parts
model that is too large   ─▶ those of its loss alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigbrain_fx.core import LossCount
from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.micro_batches.carried import carried
from bigbrain_fx.frontend.micro_batches.causes import Diagnosis
from bigbrain_fx.frontend.micro_batches.comparison import LATER_S, Comparison, Weights, spread
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import Tensors, Trainee
from bigbrain_fx.frontend.micro_batches.graph_rules import remarks
from bigbrain_fx.frontend.micro_batches.loss_alone import losses_alone, without_loss
from bigbrain_fx.frontend.micro_batches.loss_count import (
    count_by,
    count_of,
    explained,
    fitted_shares,
    require_additive,
)
from bigbrain_fx.frontend.micro_batches.term import bound_of_a_mean
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.check import work_of
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import Batch, fill

if TYPE_CHECKING:
    from bigbrain_fx.frontend.tracing.captured import Captured

_LIBRARY = "transformers."
_MOST_ROWS = 16  # of an example that are run one by one
_LOOP_FLOPS = 1e10  # of a forward: some tenths of a second for all runs of a comparison
_ENOUGH_ROWS = 2  # of a large model, whose loss was compared on all rows
_IGNORED = -100  # by every loss of transformers
_NOT_ALONE = "the model is large, and its loss alone cannot be run on later batches"
_NO_NUMBERS = "the model is built without weights here, and `split` of a model file compares them"


@dataclass(frozen=True)
class Training:
    """How a captured model is trained, as far as one step goes.

    Attributes:
        module: the user's.
        loss: as the user gave it.
        autocast: dtype.
        loss_weight: the user's count by which micro-batches weigh.
        later: returns batches of the data, after the first.
        from_shapes: whether an estimate asks, which takes seconds and runs nothing.
    """

    module: nn.Module
    loss: Loss | None
    autocast: str | None
    loss_weight: Callable[[object], object] | None = None
    later: Callable[[], Sequence[object]] = tuple
    from_shapes: bool = False


def micro_batch_effect(training: Training, captured: Captured, count: int) -> MicroBatchEffect:
    """Compare a step on the example batch with one in micro-batches; name cause and remedy.

    Args:
        training: the user's module, its loss, and the count by which micro-batches weigh.
        captured: its graph and example batch.
        count: of micro-batches, as planned.

    Raises:
        InputError: `loss_weight` gives no number, or one that does not add up; or the dimension of
            the rows is ambiguous, and it matters.
    """
    batch = captured.batch
    if count < 2 or batch.rows < 2 or captured.graph.loss is None:
        return MicroBatchEffect(count, batch.rows, is_equal=True)
    nothing = MicroBatchEffect(count, not_compared=_NO_NUMBERS)
    has_none = _has_no_numbers(training.module)
    if has_none and training.from_shapes:
        return _unmeasured(nothing, captured)
    later = spread(_later(training, batch))
    if has_none:
        about = training, captured, _comparison(training, captured)
        return _of_large(captured, nothing, _first_of_loss(*about, [batch, *later], count))
    comparison = replace(_comparison(training, captured), later=next(iter(later), None))
    _require_weights(training, comparison, count)
    is_large = work_of(captured.graph, batch.rows) > _LOOP_FLOPS
    about = training, captured, comparison
    alone = _first_of_loss(*about, [batch, *later], count) if is_large else None
    if not comparison.affordable_rows(count):
        return _of_large(captured, comparison.effect(count), alone)
    if alone is not None and alone.effect.is_equal:
        comparison = replace(comparison, enough_rows=_ENOUGH_ROWS)
        effect = _of_few_rows(comparison, alone.effect, count)
        if effect.is_equal:
            return carried(comparison, effect) or _bounded(comparison, captured, effect) or effect
    elif alone is not None and alone.batch is not batch:
        comparison = replace(comparison, later=alone.batch)
    effect = _effect(training, captured, comparison, count)
    apart = _first_apart(comparison, effect, later[1:])
    if apart is not None:
        effect = _effect(training, captured, replace(comparison, later=apart), count)
    if effect.differs:
        return effect
    return carried(comparison, effect) or _bounded(comparison, captured, effect) or effect


def _bounded(
    comparison: Comparison, captured: Captured, effect: MicroBatchEffect
) -> MicroBatchEffect | None:
    """Name a bound of a mean over rows, which parts may pass one by one in a later step."""
    rows, count = effect.rows, min(effect.micro_batches, effect.rows)
    line = bound_of_a_mean(captured, comparison.cut(rows, count)[1:]) if count > 1 else ""
    if not line or effect.not_compared:
        return None
    cause = f"A bound of a mean over rows: {line}"
    return replace(effect, not_compared="they agree while all are on one side of it", cause=cause)


def later_effect(
    training: Training, captured: Captured, count: int, batch: object
) -> MicroBatchEffect | None:
    """Return the effect of micro-batches on a batch of a loop that is under way.

    None where it is the same step, or a batch of another shape. Of a large model the loss alone is
    compared, which takes tenths of a second.
    """
    if work_of(captured.graph, captured.batch.rows) <= _LOOP_FLOPS:
        effect = micro_batch_effect(replace(training, later=lambda: [batch]), captured, count)
        return effect if effect.differs else None
    own = captured.batch.like(batch)
    if own is None or _has_no_numbers(training.module):
        return None
    comparison = _comparison(training, captured)
    found = _loss_effect(training, captured, comparison, own, count)
    if found is None:
        return MicroBatchEffect(count, not_compared=_NOT_ALONE)
    if found.is_equal:
        return None
    example = _loss_effect(training, captured, comparison, captured.batch, count)
    return found if example is not None and example.is_equal else None


def _loss_effect(
    training: Training, captured: Captured, comparison: Comparison, batch: Batch, count: int
) -> MicroBatchEffect | None:
    """Compare the loss alone on a batch; None where it cannot be run without the model."""
    found = None
    plain, weights = comparison.trainee.plain, comparison.weights
    with suppress(ValueError, StopIteration):
        for alone, part in losses_alone(plain, captured, batch, weights, count):
            effect = _effect(training, part, alone, count)
            if effect.is_equal:
                return effect
            found = found or (None if effect.not_compared else effect)
    if found is None:
        return None
    cause = f"{found.cause} (the loss alone was compared, on drawn results of the model)"
    return replace(found, parameter="", cause=cause)


def _of_few_rows(comparison: Comparison, alone: MicroBatchEffect, count: int) -> MicroBatchEffect:
    """Compare a large model on a few rows, weighed and divided as its loss alone has shown."""
    batch, found = comparison.batch, alone.loss_count
    own = replace(comparison, batch=with_divided(batch, alone.divided))
    if found is not None:
        own = _with_count(own, lambda part: count_of(found, batch, part))
    return replace(own.effect(count), loss_count=found, divided=alone.divided)


@dataclass(frozen=True)
class _OfLoss:
    """An effect that the loss alone shows, and the batch with which it was found."""

    effect: MicroBatchEffect
    batch: Batch


def _first_of_loss(
    training: Training,
    captured: Captured,
    comparison: Comparison,
    batches: Sequence[Batch],
    count: int,
) -> _OfLoss | None:
    """Compare the loss alone on as many batches as take a second; return the first difference.

    Returns:
        Without one the first batch's effect; None where the loss cannot be run alone.
    """
    first, is_over = None, budget(LATER_S)
    for batch in batches:
        effect = None if is_over() else _loss_effect(training, captured, comparison, batch, count)
        if effect is None:
            break
        if effect.differs:
            return _OfLoss(effect, batch)
        first = first or _OfLoss(effect, batch)
    return first


def _of_large(
    captured: Captured, nothing: MicroBatchEffect, alone: _OfLoss | None
) -> MicroBatchEffect:
    """Return the effect of the loss of a model that is not run; rules know of the rest."""
    if alone is None:
        return _unmeasured(nothing, captured)
    if alone.effect.differs:
        return alone.effect
    said = f"{nothing.not_compared}; its loss alone agrees"
    others = replace(captured, graph=without_loss(captured.graph))
    found = _unmeasured(replace(nothing, not_compared=said), others)
    return replace(found, loss_count=alone.effect.loss_count, divided=alone.effect.divided)


def _first_apart(
    comparison: Comparison, effect: MicroBatchEffect, batches: Sequence[Batch]
) -> Batch | None:
    """Return a batch that differs from its parts, where those compared so far do not."""
    if not effect.is_equal or effect.not_compared:
        return None
    batch, count = comparison.batch, effect.loss_count
    if count is not None:
        comparison = _with_count(comparison, lambda part: count_of(count, batch, part))
    own = replace(comparison, batch=with_divided(batch, effect.divided))
    drawn = [with_divided(other, effect.divided) for other in batches]
    place = own.first_apart(drawn, effect.micro_batches)
    return None if place is None else batches[place]


def _effect(
    training: Training, captured: Captured, comparison: Comparison, count: int
) -> MicroBatchEffect:
    """Compare the batch with its parts, all of which begin with the same state."""
    batch, library = captured.batch, _library_count(training, comparison)
    if library is not None:
        own = _with_count(comparison, lambda part: count_of(library, batch, part))
        effect = own.effect(count)
        if effect.is_equal:
            return replace(effect, loss_count=library)
    finest = _in_rows(comparison, count)
    if finest is not None and finest.is_equal:  # so any parts are that rows add up to
        return replace(finest, micro_batches=count)
    effect = comparison.effect(count)
    if effect.not_compared:
        return _unmeasured(effect, captured)
    if effect.is_equal and finest is not None:
        found = Diagnosis(comparison, captured, finest).run()
        return replace(found, micro_batches=count, seen_in=finest.micro_batches)
    if effect.is_equal:
        return effect
    named = _divided(comparison, count) or _whole_number(comparison, effect)
    return named or Diagnosis(comparison, captured, effect).run()


def _in_rows(comparison: Comparison, count: int) -> MicroBatchEffect | None:
    """Compare the batch with its rows: the planned number of parts may agree by chance.

    Halves may have as many valid positions. Rows without one have no loss: then larger parts are
    compared.

    Returns:
        The effect of the smallest parts with a loss; None where rows are many, or cannot be run
            alone, as with batch statistics.
    """
    rows = comparison.batch.rows
    while count < rows <= _MOST_ROWS:
        effect = comparison.effect(rows)
        if effect.not_compared:
            return None
        if effect.is_equal or math.isfinite(effect.parts_loss):
            return effect
        rows = rows // 2 if rows % (2 * count) == 0 else 0
    return None


def with_divided(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch of which micro-batches get their part of some entries, which are counts."""
    entries = (replace(e, of_all=batch.rows) if e.name in names else e for e in batch.entries)
    return replace(batch, entries=tuple(entries))


def _divided(comparison: Comparison, count: int) -> MicroBatchEffect | None:
    """Return the effect with counts divided, where micro-batches then train the batch.

    A loss that is a sum over `ntokens` is in a micro-batch the sum over its part of it.
    """
    batch, later = comparison.batch, comparison.later
    counts = [e.name for e in batch.entries if not e.tensor.dim() and e.tensor.is_floating_point()]
    for names in dict.fromkeys((*((name,) for name in counts), tuple(counts))):
        own = replace(
            comparison,
            batch=with_divided(batch, names),
            later=later and with_divided(later, names),
        )
        effect = own.effect(count)
        if names and effect.is_equal:
            return replace(effect, divided=names)
    return None


def _whole_number(comparison: Comparison, effect: MicroBatchEffect) -> MicroBatchEffect | None:
    """Name an entry of integers that is a count with which micro-batches could be right."""
    is_count = [
        not e.tensor.dim() and e.tensor.dtype == torch.int64 for e in comparison.batch.entries
    ]
    if not any(is_count):
        return None
    batch, later = (b and _as_floats(b) for b in (comparison.batch, comparison.later))
    assert batch is not None
    own = _divided(replace(comparison, batch=batch, later=later), effect.micro_batches)
    if own is None:
        return None
    names = " and ".join(own.divided)
    return replace(
        effect,
        cause=f"The loss is a sum over rows, divided by {names} of the whole batch",
        remedy=f"Give {names} as a Python number (or as torch.float32): then each micro-batch has "
        "its part of it",
    )


def _as_floats(batch: Batch) -> Batch:
    def changed(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() or tensor.dtype != torch.int64 else tensor.float()

    entries = (replace(e, tensor=changed(e.tensor)) for e in batch.entries)
    return replace(batch, entries=tuple(entries))


def _has_no_numbers(module: nn.Module) -> bool:
    return any(is_blank(t) for t in (*module.parameters(), *module.buffers()))


def _unmeasured(effect: MicroBatchEffect, captured: Captured) -> MicroBatchEffect:
    """Add the findings of graph rules, where nothing was run."""
    known = list(remarks(captured.graph, captured.inputs()))
    return replace(effect, cause="; ".join(known) or effect.cause)


def _comparison(training: Training, captured: Captured) -> Comparison:
    batch, module = captured.batch, training.module
    example = fill(batch.template, {e.name: e.tensor for e in batch.entries})
    how = route(module, example, training.loss is not None)
    step = Step(module, training.loss, batch, how)
    constants = _constants(module, captured)
    trainee = Trainee(Plain(step, module, training.autocast), constants=constants)
    given = training.loss_weight
    weights = Weights() if given is None else Weights(count_by(given, batch))
    return Comparison(trainee, batch, captured.graph, weights)


def _constants(module: nn.Module, captured: Captured) -> tuple[Tensor, ...]:
    """Return the graph's tensors that are neither parameters nor buffers of the module."""
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
    return tuple(t for t in captured.tensors.values() if t.data_ptr() not in own)


def _later(training: Training, batch: Batch) -> list[Batch]:
    """Return other batches of the user's data, those of the example's shapes."""
    with suppress(Exception):  # the user's own code: what it lacks is reported where it is needed
        return [own for own in map(batch.like, training.later()) if own is not None]
    return []


def _with_count(comparison: Comparison, count: Callable[[Tensors], float]) -> Comparison:
    return replace(comparison, weights=Weights(count))


def _require_weights(training: Training, comparison: Comparison, count: int) -> None:
    if training.loss_weight is not None and comparison.weights.count is not None:
        whole, *parts = comparison.cut(comparison.batch.rows, count)
        require_additive(comparison.weights.count, whole, parts)


# --------------------------------------------------------------------------- transformers


def _library_count(training: Training, comparison: Comparison) -> LossCount | None:
    """Return the count that a loss of transformers is a mean over: labels that are not ignored.

    Its models shift labels or not: the example decides, with other labels ignored in each part.
    """
    if training.loss is not None or training.loss_weight is not None:
        return None
    if not any(base.__module__.startswith(_LIBRARY) for base in type(training.module).__mro__):
        return None
    probe = _with_ignored_labels(comparison.batch)
    if probe is None:
        return None
    trial = replace(comparison, batch=probe)
    rows = trial.affordable_rows(2)
    if not rows:
        return None
    try:
        with trial.in_mode(rows, 2):
            whole, *parts = trial.cut(rows - rows % 2, 2)
            shares = fitted_shares(trial.trainee, whole, parts)
            return None if shares is None else explained(probe, parts, shares)
    except Exception:  # labels that may not be ignored: of a regression, say
        return None


def _with_ignored_labels(batch: Batch) -> Batch | None:
    """Return the batch with few labels left: two a row in its first half, six in the other.

    Rows of the first half have a first label besides, which counts where labels are not shifted.
    None: the batch has no labels of positions.
    """
    labels = [e for e in batch.entries if e.key[-1:] == ("labels",) and e.batched]
    if not labels or labels[0].tensor.is_floating_point() or labels[0].tensor.dim() != 2:
        return None
    tensor = labels[0].tensor.clamp(min=0)
    rows, length = tensor.shape
    is_early = torch.arange(rows) < rows // 2
    counts = torch.arange(length) >= length - torch.where(is_early, 2, 6)[:, None]
    counts[:, 0] = is_early
    tensor = tensor.masked_fill(~counts, _IGNORED)
    entries = tuple(replace(e, tensor=tensor) if e is labels[0] else e for e in batch.entries)
    return replace(batch, entries=entries)
