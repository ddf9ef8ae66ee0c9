"""Micro-batches that read state which earlier ones wrote: a centre, a momentum encoder.

    in turn   m0 ─▶ m1 ─▶ m2 ─▶ m3        alone   m3

Both run in training mode, with the same seeds, on weights that training has moved. An average that
begins as a copy of the weights then differs from them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.micro_batches.comparison import Comparison, training
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import (
    SAME_GRADIENT,
    SAME_LOSS,
    Tensors,
    difference,
)
from bigbrain_fx.frontend.translation.kept import LEAF, LOSS

_SAID = 3  # names in a sentence


def carried(comparison: Comparison, effect: MicroBatchEffect) -> MicroBatchEffect | None:
    """Compare the last micro-batch after the earlier ones with itself alone; None: they agree.

    Also None without a comparison: the micro-batches are too large, or the model fails on them.
    """
    own = {param.name for param in comparison.graph.params}
    written = list(dict.fromkeys(_written(comparison.graph, own)))
    if not written or effect.rows < 2:
        return None
    with suppress(Exception), training(comparison.trainee.plain.model):  # the user's own code
        parts = comparison.cut(effect.rows, min(effect.micro_batches, effect.rows))[1:]
        trainee = comparison.trainee
        for place in (nullcontext(), trainee.moved(trainee.step(parts[0]))):
            with place:
                for order in _orders(parts, is_read=_is_read(comparison.graph, written)):
                    if found := _compared(comparison, effect, order, written):
                        return found
    return None


def _orders(parts: list[Tensors], *, is_read: bool) -> list[list[Tensors]]:
    """Return orders of micro-batches: a choice of experts by a count is the same in some."""
    more = [parts[::-1], [*parts, parts[-1]], [*parts[::-1], parts[0]]]
    return [parts, *(more if is_read else [])]


def _is_read(graph: Graph, written: list[str]) -> bool:
    """Whether forward computes with what it writes; batch norms that train do not."""
    reading = (op for op in graph.ops if "batch_norm" not in op.target)
    return any(({*op.refs, *op.params} - {*op.mutates}) & {*written} for op in reading)


def _written(graph: Graph, own: Container[str]) -> Iterator[str]:
    """Yield buffers and frozen weights that forward writes, and tensors that Python may write."""
    for op in graph.ops:
        if op.target.startswith((LEAF, LOSS)):
            yield op.module_path or op.target
        yield from (name for name in op.mutates if name in own)


def _compared(
    comparison: Comparison, effect: MicroBatchEffect, parts: list[Tensors], written: list[str]
) -> MicroBatchEffect | None:
    trainee = comparison.trainee
    alone, in_turn = trainee.last_of(parts[-1:]), trainee.last_of(parts)
    off = difference(alone, in_turn, trainee.names)
    if not alone.is_finite or off.is_within(SAME_LOSS, SAME_GRADIENT):
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
