"""Reasons why micro-batches train something else than their batch, and remedies.

Each remedy is run before it is named. Remedies are another dimension to cut an entry along, an
entry that is not cut, or a count by which micro-batches weigh. If none is found, the graph runs on
the batch and on its parts. The first operation whose value no longer consists of the parts' values
names the line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from bigbrain_fx.core import LossCount
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.micro_batches.comparison import (
    GRADIENT_TOLERANCE,
    LEAST,
    LOSS_TOLERANCE,
    Comparison,
    Weights,
)
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect, digits_apart
from bigbrain_fx.frontend.micro_batches.gradients import Tensors, difference, even, summed
from bigbrain_fx.frontend.micro_batches.graph_rules import remarks
from bigbrain_fx.frontend.micro_batches.loss_count import count_of, explained, fitted_shares
from bigbrain_fx.frontend.micro_batches.term import first_apart
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.translation.batch import Batch, Entry
from bigbrain_fx.frontend.translation.batch_dims import may_be_offsets

NOT_GROWING = (
    "The gradient of {} does not grow with the loss: a hook, or a backward of the file's own, "
    "changes it"
)
_PARTS = 4  # whose gradients are held at once
_EVEN = 1e-2  # of a share
_MEMORY = 2**31  # bytes of gradients that may be held


@dataclass(frozen=True)
class Diagnosis:
    """One effect that differs, and the runs that can find its cause."""

    comparison: Comparison
    captured: Captured
    effect: MicroBatchEffect

    def run(self) -> MicroBatchEffect:
        """Return the effect with its cause and a remedy.

        Raises:
            InputError: the dimension of the batch is ambiguous, and it matters.
        """
        with self.comparison.where_it_differs(self.effect) as there:
            return replace(self, comparison=there).found()

    def found(self) -> MicroBatchEffect:
        """Return the effect with the first cause that explains it."""
        return self._sum() or self._backward() or self._entry() or self._count() or self._term()

    @property
    def _parts(self) -> int:
        return min(self.effect.micro_batches, self.effect.rows, _PARTS)

    def _cut(self) -> tuple[Tensors, list[Tensors]]:
        rows = self.effect.rows - self.effect.rows % self._parts
        whole, *parts = self.comparison.cut(rows, self._parts)
        return whole, parts

    def _is_right(self, whole: Tensors, parts: Sequence[Tensors], shares: Sequence[float]) -> bool:
        trainee = self.comparison.trainee
        with suppress(Exception):  # the user's own code, on what it may not know
            one, other = trainee.step(whole), trainee.accumulated(parts, shares)
            found = difference(one, other, trainee.names, LEAST)
            return found.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE)
        return False

    def _sum(self) -> MicroBatchEffect | None:
        """Say that a loss grows with the rows, where parts add up to it as they are."""
        whole, parts = self._cut()
        if not self._is_right(whole, parts, [1.0] * len(parts)):
            return None
        return replace(
            self.effect,
            is_sum=True,
            cause="The loss is a sum over rows, and a step takes the mean of its micro-batches",
            remedy="Divide the loss by the number of rows, as .mean() does",
        )

    def _backward(self) -> MicroBatchEffect | None:
        """Name a parameter of which half the loss has another gradient than half of the whole's."""
        whole, trainee = self._cut()[0], self.comparison.trainee
        one, half = trainee.step(whole), trainee.step(whole, 0.5)
        twice = summed([half, half], [0.5, 0.5], len(trainee.names))
        off = difference(one, twice, trainee.names, LEAST)
        if off.is_within(LOSS_TOLERANCE, GRADIENT_TOLERANCE):
            return None
        return replace(self.effect, cause=NOT_GROWING.format(off.parameter))

    def _entry(self) -> MicroBatchEffect | None:
        """Name an entry with which parts add up when it is cut otherwise, or not at all."""
        whole, parts = self._cut()
        batch = self.comparison.batch
        for entry in (e for e in batch.entries if e.tensor.dim() and not e.said):
            for dim in _other_dims(entry, batch.rows):
                own = _recut(entry, dim, whole, parts)
                if own and self._adds_up(whole, own):
                    self._require_declared()
                    return self._of_entry(entry, dim)
        if is_guess(batch):
            self._require_declared()
        return None

    def _adds_up(self, whole: Tensors, parts: Sequence[Tensors]) -> bool:
        """Whether the parts' sum is the batch's value, and no single part has all of it."""
        if not self._is_right(whole, parts, even(len(parts))):
            return False
        return not self._is_right(whole, [parts[0]], [1.0])

    def _require_declared(self) -> None:
        if is_guess(self.comparison.batch):
            raise undeclared(self.comparison.batch, self.effect)

    def _of_entry(self, entry: Entry, dim: int | None) -> MicroBatchEffect:
        key = entry.said_name
        how = "given whole to each" if dim is None else f"cut along dimension {dim}"
        return replace(
            self.effect,
            cause=f"Rows do not stand alone: {key!r} is cut along dimension {entry.dim}",
            remedy=f"With {key!r} {how} they add up: batch_dims = {{{key!r}: {dim}}} in the model "
            "file",
        )

    def _count(self) -> MicroBatchEffect | None:
        """Name the count by which the parts would have to weigh."""
        if self._parts * _bytes_of(self.captured) > _MEMORY or self.comparison.weights.count:
            return None
        whole, parts = self._cut()
        shares = fitted_shares(self.comparison.trainee, whole, parts)
        if shares is None or not self._is_right(whole, parts, shares):
            return None
        count = explained(self.comparison.batch, parts, shares)
        count = count if count is not None and self._weighs(count) else None
        if count is None and _are_even(shares):
            return None
        cause = self._known_line() or "The loss is a mean over elements that data choose"
        return replace(
            self.effect, loss_count=count, cause=cause, remedy=_remedy_of_count(count, shares)
        )

    def _weighs(self, count: LossCount) -> bool:
        """Whether micro-batches that weigh so train the batch: two shares may fit by chance."""
        batch = self.comparison.batch
        weights = Weights(lambda part: count_of(count, batch, part))
        return replace(self.comparison, weights=weights).effect(self.effect.micro_batches).is_equal

    def _term(self) -> MicroBatchEffect:
        """Name the line; the remedy is one micro-batch."""
        offsets = [e.said_name for e in self.comparison.batch.entries if self._is_offsets(e)]
        cause = (
            f"Rows do not stand alone: {offsets[0]!r} may hold offsets into another entry"
            if offsets
            else self._line() or "Rows do not stand alone"
        )
        return replace(self.effect, cause=cause)

    def _is_offsets(self, entry: Entry) -> bool:
        others = [e.tensor for e in self.comparison.batch.entries if e is not entry]
        return entry.batched and may_be_offsets(entry.tensor, others)

    def _line(self) -> str:
        """Return a rule's finding, else the first value that does not consist of its parts'."""
        known = self._known_line()
        if known:
            return known
        whole, parts = self._cut()
        line = first_apart(self.captured, whole, parts, self.comparison.trainee.draws)
        return f"Rows do not stand alone: {line}" if line else ""

    def _known_line(self) -> str:
        return "; ".join(remarks(self.captured.graph, self.captured.inputs()))


def _are_even(shares: Sequence[float]) -> bool:
    """Whether the weights are the default ones of the parts: another count would change nothing."""
    return all(abs(share * len(shares) - 1) < _EVEN for share in shares)


def _bytes_of(captured: Captured) -> int:
    trained = (captured.tensors[p.name] for p in captured.graph.params if p.spec.requires_grad)
    return sum(t.nbytes for t in trained)


def _remedy_of_count(count: LossCount | None, shares: Sequence[float]) -> str:
    if count is None:
        listed = ", ".join(f"{share:.2g}" for share in shares)
        return (
            f"The parts would have to weigh {listed}: say how many elements a batch's loss is a "
            "mean over, def loss_weight(batch): return ... in the model file"
        )
    return (
        "Weighed by their count they add up: "
        f"def loss_weight(batch): return {count.expression} in the model file"
    )


# --------------------------------------------------------------------------- entries


def _other_dims(entry: Entry, rows: int) -> list[int | None]:
    own = entry.tensor
    dims = [d for d in range(own.dim()) if own.shape[d] == rows and (d or not entry.batched)]
    return [None, *dims] if entry.batched else [*dims]


def _recut(
    entry: Entry, dim: int | None, whole: Tensors, parts: Sequence[Tensors]
) -> list[dict[str, Tensor]]:
    """Return the parts with one entry cut along another dimension; empty where that cannot be."""
    own = whole[entry.name]
    if dim is not None and own.shape[dim] % len(parts):
        return []
    pieces = [own] * len(parts) if dim is None else own.tensor_split(len(parts), dim)
    return [{**p, entry.name: piece.clone()} for p, piece in zip(parts, pieces, strict=True)]


def is_guess(batch: Batch) -> bool:
    """Whether entries disagree on the number of rows: no number has a majority, or time is first.

    [time, rows, features] beside labels by row: the uncut entry's dimension 1 has as many rows.
    """
    if any(entry.said and entry.batched for entry in batch.entries):
        return False
    own = [e for e in batch.entries if e.tensor.dim() and e.tensor.shape[0] > 1 and not e.said]
    counts = sorted(Counter(entry.tensor.shape[0] for entry in own).values())
    inner = {entry.tensor.shape[1] for entry in own if entry.batched and entry.tensor.dim() > 1}
    outer = {entry.tensor.shape[0] for entry in own if not entry.batched}
    return len(counts) > 1 and (counts[-1] == counts[-2] or bool(inner & outer))


def undeclared(batch: Batch, effect: MicroBatchEffect) -> InputError:
    """Refuse to guess which dimension is the batch where it matters."""
    shapes = ", ".join(f"{e.said_name!r} {list(e.tensor.shape)}" for e in batch.entries)
    names = ", ".join(f"{e.said_name!r}: {0 if e.batched else None}" for e in batch.entries)
    whole, parts = digits_apart(effect.whole_loss, effect.parts_loss)
    return InputError(
        f"which dimension is the batch cannot be told from {shapes}, and it matters: cut on "
        f"{batch.rows} rows the loss is {parts}, whole it is {whole}",
        code="BX2150",
        at="example_batch",
        help=f"say it in the model file, such as batch_dims = {{{names}}}: each entry's dimension "
        "that is the batch, or None where every micro-batch gets all of it",
    )
