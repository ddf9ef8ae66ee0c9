"""Measure what micro-batches change for one captured model: the entry point of this package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from bigbrain_fx.core import LossCount
from bigbrain_fx.frontend.micro_batches.causes import Diagnosis
from bigbrain_fx.frontend.micro_batches.comparison import Comparison, Weights
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import Tensors, Trainee
from bigbrain_fx.frontend.micro_batches.graph_rules import remarks
from bigbrain_fx.frontend.micro_batches.loss_count import (
    count_by,
    count_of,
    explained,
    fitted_shares,
    require_additive,
)
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import Batch, fill

if TYPE_CHECKING:
    from bigbrain_fx.frontend.tracing.captured import Captured

_LIBRARY = "transformers."
_IGNORED = -100  # by every loss of transformers
_NO_NUMBERS = "the model has no numbers here: its weights come from elsewhere"


@dataclass(frozen=True)
class Training:
    """How a captured model is trained, as far as one step goes."""

    module: nn.Module
    loss: Loss | None
    autocast: str | None
    loss_weight: Callable[[object], object] | None = None
    next_batch: Callable[[], object] | None = None  # of the data, after the first


def micro_batch_effect(training: Training, captured: Captured, count: int) -> MicroBatchEffect:
    """Compare a step on the example batch with one in micro-batches; name cause and remedy.

    Args:
        training: the user's module, its loss, and the count by which micro-batches weigh.
        captured: its graph and example batch.
        count: of micro-batches, as planned.

    Raises:
        InputError: `loss_weight` gives no number, or one that does not add up; or which dimension
            of the batch is its rows cannot be told, and it matters.
    """
    batch = captured.batch
    if count < 2 or batch.rows < 2 or captured.graph.loss is None:
        return MicroBatchEffect(count, batch.rows, is_equal=True)
    if _has_no_numbers(training.module):
        return _unmeasured(MicroBatchEffect(count, not_compared=_NO_NUMBERS), captured)
    comparison = _comparison(training, captured)
    _require_weights(training, comparison, count)
    library = _library_count(training, comparison)
    if library is not None:
        own = _with_count(comparison, lambda part: count_of(library, batch, part))
        effect = own.effect(count)
        if effect.is_equal:
            return replace(effect, loss_count=library)
    effect = comparison.effect(count)
    if effect.not_compared:
        return _unmeasured(effect, captured)
    return effect if effect.is_equal else Diagnosis(comparison, captured, effect).run()


def _has_no_numbers(module: nn.Module) -> bool:
    return any(is_blank(t) for t in (*module.parameters(), *module.buffers()))


def _unmeasured(effect: MicroBatchEffect, captured: Captured) -> MicroBatchEffect:
    """Add what rules know of the graph, where nothing was run."""
    known = list(remarks(captured.graph, captured.inputs()))
    return replace(effect, cause="; ".join(known))


def _comparison(training: Training, captured: Captured) -> Comparison:
    batch, module = captured.batch, training.module
    example = fill(batch.template, {e.name: e.tensor for e in batch.entries})
    how = route(module, example, training.loss is not None)
    step = Step(module, training.loss, batch, how)
    trainee = Trainee(Plain(step, module, training.autocast))
    given = training.loss_weight
    weights = Weights() if given is None else Weights(count_by(given, batch))
    return Comparison(trainee, batch, captured.graph, weights, _later(training, batch))


def _later(training: Training, batch: Batch) -> Batch | None:
    """Return another batch of the user's data; None where there is none of these shapes."""
    with suppress(Exception):  # the user's own code: what it lacks is reported where it is needed
        return batch.like(training.next_batch()) if training.next_batch else None
    return None


def _with_count(comparison: Comparison, count: Callable[[Tensors], float]) -> Comparison:
    return replace(comparison, weights=Weights(count))


def _require_weights(training: Training, comparison: Comparison, count: int) -> None:
    if training.loss_weight is not None and comparison.weights.count is not None:
        whole, *parts = comparison.cut(comparison.batch.rows, count)
        require_additive(comparison.weights.count, whole, parts)


# --------------------------------------------------------------------------- transformers


def _library_count(training: Training, comparison: Comparison) -> LossCount | None:
    """Return the count that a loss of transformers is a mean over: labels that are not ignored.

    Its models shift labels or not; the example, with other labels ignored in each part, tells.
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
        with trial.in_mode():
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
