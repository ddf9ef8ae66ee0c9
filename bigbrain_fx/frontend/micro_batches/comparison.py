"""Compare the training step on a whole batch with the same step in micro-batches.

The user's module runs as plain PyTorch, forward and backward: on the batch, and on its parts as a
bundle cuts them. Both run once more on weights that training has moved, since a wrong mean may look
right at initial weights. A difference that may be rounding is computed again in float64.

The first batches may be such that parts agree: without padding, or with a term of weight zero.
Later ones are compared as well, as many as take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.micro_batches.gradients import (
    Difference,
    StepGradients,
    Tensors,
    Trainee,
    difference,
    even,
    micro_batches,
    unlike_rows,
)
from bigbrain_fx.frontend.tracing.check import work_of
from bigbrain_fx.frontend.tracing.step import modes_kept
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.kept import LEAF, LOSS

_T = TypeVar("_T")
LOSS_TOLERANCE = 1e-5
"""Share of the loss that is taken for rounding, in float32."""
GRADIENT_TOLERANCE = 1e-3
"""Share of the norm of all gradients that is taken for rounding, in float32."""
LEAST = 3e-5
"""Share of all gradients that a parameter's has to have to be compared by itself."""
LATER_S = 1.0
"""Seconds for which batches of the data after the second are compared."""
_EXACT = 1e-5  # of either, in float64; parts of a model may compute in float32 all the same
_COARSE = 0.05  # of either, where the model computes in 16 bits and cannot in float64
_RUNS = 12  # forward passes that a comparison takes: whole and parts, twice, with their backwards
_FLOPS = 6e12  # a minute on a usual machine
_FEW_FLOPS = 1e11  # a second


@dataclass(frozen=True)
class Weights:
    """How much each micro-batch counts: the same, or by the user's count of the loss's elements."""

    count: Callable[[Tensors], float] | None = None

    def shares(self, parts: Sequence[Tensors]) -> list[float]:
        """Return the weight of each micro-batch in the step."""
        if self.count is None:
            return even(len(parts))
        counts = [self.count(part) for part in parts]
        return [count / sum(counts) for count in counts]


@dataclass(frozen=True)
class Comparison:
    """One model, one batch, and how micro-batches weigh.

    Attributes:
        later: a batch of the user's data, for the weights that training has moved.
        enough_rows: no more are run where they take seconds, and at the first weights only: the
            loss was compared alone, on any results.
    """

    trainee: Trainee
    batch: Batch
    graph: Graph
    weights: Weights = Weights()
    later: Batch | None = None
    enough_rows: int | None = None

    def effect(self, count: int) -> MicroBatchEffect:
        """Compare the batch with `count` micro-batches of it; no cause is looked for.

        Returns:
            The difference, or the reason why it cannot be measured.
        """
        rows = self.affordable_rows(count)
        nothing = MicroBatchEffect(count, rows)
        if not rows:
            return replace(nothing, not_compared=_TOO_LARGE.format(self._seconds(2)))
        try:
            parts = min(count, rows)
            with self.in_mode(rows, parts):
                return self._compared(nothing, parts)
        except BigBrainError:
            raise
        except Exception as error:  # the user's own code, on rows it may not know
            first = (str(error).splitlines() or [""])[0]
            failed = f"{type(error).__name__}: {first[:200]}"
            return replace(nothing, not_compared=failed, cause=_FAILED)

    def affordable_rows(self, count: int) -> int:
        """Return how many rows of the batch can be run within the time; 0 where not even two."""
        rows = self.batch.rows
        while rows >= 2 and self._is_too_long(rows):
            rows //= 2
        return rows - rows % count if rows >= count else (rows if rows >= 2 else 0)

    @property
    def _may_draw(self) -> bool:
        """Whether a step may draw: of a large model its graph says so, and no run is made."""
        drawing = (op.random or op.target.startswith((LEAF, LOSS)) for op in self.graph.ops)
        return not self.enough_rows or any(drawing)

    def _is_too_long(self, rows: int) -> bool:
        work = work_of(self.graph, rows) * _RUNS
        return work > _FLOPS or (rows > (self.enough_rows or rows) and work > _FEW_FLOPS)

    def _seconds(self, rows: int) -> float:
        return 60 * work_of(self.graph, rows) * _RUNS / _FLOPS

    def _compared(self, found: MicroBatchEffect, count: int) -> MicroBatchEffect:
        whole, *parts = self.cut(found.rows, count)
        first = self.trainee.step(whole)
        if not first.is_finite:
            return replace(found, not_compared="the loss or a gradient is not finite")
        effect = self._judged(found, first, whole, parts)
        has_none = not any(g is not None for g in first.gradients)
        if effect.differs or has_none or self.enough_rows:
            return effect
        if self.later is not None:
            whole, *parts = replace(self, batch=self.later).cut(found.rows, count)
        with self.trainee.moved(first):
            moved = self.trainee.step(whole)
            if not moved.is_finite:
                return effect
            again = self._judged(found, moved, whole, parts)
        return replace(again, after_steps=True) if again.differs else effect

    def first_apart(self, batches: Sequence[Batch], count: int) -> int | None:
        """Return the place of a batch that differs from its parts at the moved weights."""
        rows, is_over = self.affordable_rows(count), budget(LATER_S)
        if not rows:
            return None
        count = min(count, rows)
        with suppress(Exception), self.in_mode(rows, count):  # the user's own code
            first = self.trainee.step(self.cut(rows, 1)[0])
            with self.trainee.moved(first):
                for place, batch in enumerate(batches):
                    if is_over():
                        return None
                    if replace(self, batch=batch)._is_apart(rows, count):
                        return place
        return None

    def _is_apart(self, rows: int, count: int) -> bool:
        whole, *parts = self.cut(rows, count)
        found = self.trainee.step(whole)
        nothing = MicroBatchEffect(count, rows)
        return found.is_finite and self._judged(nothing, found, whole, parts).differs

    @contextmanager
    def where_it_differs(self, effect: MicroBatchEffect) -> Iterator[Comparison]:
        """Be at the weights, and have the batch, with which an effect was found."""
        with self.in_mode(effect.rows, min(effect.micro_batches, effect.rows)):
            if not effect.after_steps:
                yield self
                return
            first = self.trainee.step(self.cut(effect.rows, 1)[0])
            with self.trainee.moved(first):
                yield replace(self, batch=self.later or self.batch)

    def cut(self, rows: int, count: int) -> list[Tensors]:
        """Return some rows of the batch, then their micro-batches."""
        batch = unlike_rows(self.batch, rows)
        return [*micro_batches(batch, rows, 1), *micro_batches(batch, rows, count)]

    def _judged(
        self, found: MicroBatchEffect, first: StepGradients, whole: Tensors, parts: list[Tensors]
    ) -> MicroBatchEffect:
        """Compare at the weights that the model has now."""
        shares = self.weights.shares(parts)
        total = self.trainee.accumulated(parts, shares)
        off = difference(first, total, self.trainee.names)
        effect = replace(
            found,
            is_equal=off.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE),
            whole_loss=first.loss,
            parts_loss=total.loss,
            gradient_error=off.gradient,
            parameter=off.parameter,
            parameter_error=off.parameter_gradient,
        )
        if effect.is_equal:
            return self._with_small(
                effect, difference(first, total, self.trainee.names, LEAST), whole, parts, shares
            )
        if not _may_be_rounding(off):
            return effect
        return replace(effect, is_equal=self.is_same(whole, parts, shares, off))

    def is_same(
        self, whole: Tensors, parts: list[Tensors], shares: Sequence[float], off: Difference
    ) -> bool:
        """Whether a small difference is rounding: in float64, else by a wider tolerance."""
        exact = self._in_float64(whole, parts, shares, 1e-3)
        if exact is None:
            return off.is_within(_COARSE, _COARSE) and _is_coarse(self.trainee)
        return exact.is_within(_EXACT, _EXACT)

    def _with_small(
        self,
        effect: MicroBatchEffect,
        off: Difference,
        whole: Tensors,
        parts: list[Tensors],
        shares: Sequence[float],
    ) -> MicroBatchEffect:
        """Let a parameter with a small gradient count where float64 says that it differs, too.

        Adam divides by the gradient's own size, so that a term of weight 1e-4 trains as any other.
        """
        if off.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE):
            return effect
        exact = self._in_float64(whole, parts, shares, LEAST)
        if exact is None or exact.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE):
            return effect
        return replace(
            effect,
            is_equal=False,
            parameter=exact.parameter,
            parameter_error=exact.parameter_gradient,
        )

    def _in_float64(
        self, whole: Tensors, parts: list[Tensors], shares: Sequence[float], least: float
    ) -> Difference | None:
        """Compare in float64; None where that cannot be: a model insists on its own type, say."""
        exact = self.trainee.in_float64()
        if exact is None:
            return None
        try:
            one, other = exact.step(whole), exact.accumulated(parts, shares)
        except Exception:  # the user's own code
            return None
        return difference(one, other, self.trainee.names, least)

    @contextmanager
    def in_mode(self, rows: int, count: int) -> Iterator[None]:
        """Let the model train, with the same draws for so many rows and their parts.

        Where draws cannot be repeated (of Python, of `randperm`), let all but batch norms evaluate.
        """
        model, self.trainee.draws.rows = self.trainee.plain.model, rows
        few = micro_batches(self.batch, rows // count, 1)[0]  # the model may fail on fewer
        with training(model):
            self.trainee.draws.is_on = self._may_draw
            repeats = not self._may_draw or self.trainee.repeats(few)
            with _mode(model, (lambda _: True) if repeats else _is_batch_norm):
                yield


_FAILED = "The model fails on the rows of a micro-batch"
_TOO_LARGE = "the model is too large to run whole batches here (about {:.0f} s for two rows)"


def spread(batches: Sequence[_T]) -> list[_T]:
    """Return the first batch, the middle one, the quarters: few of them show most of the data."""
    bits = len(batches).bit_length()
    order = sorted(range(len(batches)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [batches[place] for place in order]


def _may_be_rounding(off: Difference) -> bool:
    return off.is_within(_COARSE, _COARSE)


def _is_coarse(trainee: Trainee) -> bool:
    """Whether a model computes in 16 bits."""
    own = (p.element_size() for p in trainee.plain.model.parameters() if p.is_floating_point())
    return trainee.plain.autocast is not None or any(size < 4 for size in own)


def training(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model train as its own `train()` says; give each module its mode back at the end."""
    return _mode(model, lambda _: True)


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._NormBase)


@contextmanager
def _mode(model: nn.Module, trains: Callable[[nn.Module], bool]) -> Iterator[None]:
    with modes_kept(model):
        model.train()  # it may leave a teacher, or a frozen batch norm, in eval mode
        for part in model.modules():
            part.training = part.training and trains(part)
        yield
