"""Whether a micro-batch computes with what those before it wrote: a centre, a momentum encoder.

    in turn   m0 ─▶ m1 ─▶ m2 ─▶ m3        alone   m3

Both in training mode, with the same seeds, on weights that training has moved: an average that
begins as a copy of the weights has to differ from them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.micro_batches.comparison import Comparison, training
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import Tensors, difference
from bigbrain_fx.frontend.translation.kept import LEAF, LINES, LOSS

_SAID = 3  # names in a sentence
_SAME_LOSS, _SAME_GRADIENT = 1e-6, 1e-5  # shares: the same rows in the same order, all but bitwise


def carried(comparison: Comparison, effect: MicroBatchEffect) -> MicroBatchEffect | None:
    """Compare the last micro-batch after the others with the same one alone; None: they agree.

    Also None where it cannot be told: the micro-batches are too large, or the model fails on them.
    """
    own = {param.name for param in comparison.graph.params}
    written = list(dict.fromkeys(_written(comparison.graph, own)))
    if not written or effect.rows < 2:
        return None
    with suppress(Exception), training(comparison.trainee.plain.model):  # the user's own code
        parts = comparison.cut(effect.rows, min(effect.micro_batches, effect.rows))[1:]
        with comparison.trainee.moved(comparison.trainee.step(parts[0])):
            return _compared(comparison, effect, parts, written)
    return None


def _written(graph: Graph, own: Container[str]) -> Iterator[str]:
    """Yield the buffers and frozen weights that forward writes, and what Python may write into."""
    for op in graph.ops:
        if op.target.startswith((LEAF, LINES, LOSS)):
            yield op.module_path or op.target
        yield from (name for name in op.mutates if name in own)


def _compared(
    comparison: Comparison, effect: MicroBatchEffect, parts: list[Tensors], written: list[str]
) -> MicroBatchEffect | None:
    trainee = comparison.trainee
    alone, in_turn = trainee.last_of(parts[-1:]), trainee.last_of(parts)
    off = difference(alone, in_turn, trainee.names)
    if not alone.is_finite or off.is_within(_SAME_LOSS, _SAME_GRADIENT):
        return None
    others = " and others" if len(written) > _SAID else ""  # batch norms' statistics, say
    return replace(
        effect,
        is_equal=False,
        is_carried=True,
        whole_loss=alone.loss,
        parts_loss=in_turn.loss,
        gradient_error=off.gradient,
        parameter=off.parameter,
        parameter_error=off.parameter_gradient,
        cause="A micro-batch reads what the one before it wrote: "
        f"{', '.join(written[:_SAID])}{others}",
    )
