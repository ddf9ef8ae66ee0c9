"""Loss and gradients of one training step: of a batch, or added up over micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
from torch import Tensor

from bigbrain_fx.frontend.micro_batches.draws import Draws
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.translation.batch import Batch

Tensors = Mapping[str, Tensor]
_MOVED = 0.1  # of a parameter's norm: as far as a few steps of training move it
SAME_LOSS, SAME_GRADIENT = 1e-6, 1e-5  # shares: the same rows in the same order, all but bitwise
_SMALL = 1e-2  # a norm per element, for parameters that begin as zeros


@dataclass(frozen=True)
class StepGradients:
    """Loss and gradients, by the order of the trained parameters."""

    loss: float
    gradients: list[Tensor | None]

    @property
    def is_finite(self) -> bool:
        """Whether neither the loss nor a gradient is NaN or infinite."""
        found = (bool(torch.isfinite(g).all()) for g in self.gradients if g is not None)
        return math.isfinite(self.loss) and all(found)


@dataclass(frozen=True)
class Difference:
    """Distance of two steps: of the loss, of all gradients, and of one parameter's."""

    loss: float
    gradient: float
    parameter: str
    parameter_gradient: float

    def is_within(self, loss: float, gradient: float) -> bool:
        """Whether both distances are within these limits; one parameter's within ten times."""
        return (
            self.loss <= loss
            and self.gradient <= gradient
            and self.parameter_gradient <= 10 * gradient
        )


@dataclass(frozen=True)
class Trainee:
    """The user's module and loss as a step that gives gradients."""

    plain: Plain
    is_wide: bool = False  # computes in float64
    draws: Draws = field(default_factory=Draws)
    constants: tuple[Tensor, ...] = ()  # that no module holds, and forward may write: a teacher

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters, in the order of their gradients."""
        return [n for n, p in self.plain.model.named_parameters() if p.requires_grad]

    def step(self, tensors: Tensors, share: float = 1.0) -> StepGradients:
        """Run the model forward and backward on a whole batch; gradients are of its share."""
        with self.draws.recording():
            return self._step(tensors, share)

    def _step(self, tensors: Tensors, share: float, seed: int = 0) -> StepGradients:
        given = [self._cast(tensor) for tensor in tensors.values()]
        with _kept(self.constants):
            loss, gradients = self.plain.loss_and_gradients(given, seed, share)
        return StepGradients(float(loss), list(gradients))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self.is_wide and tensor.is_floating_point() else tensor

    def accumulated(self, parts: Sequence[Tensors], shares: Sequence[float]) -> StepGradients:
        """Add up micro-batches, each times its weight; one of weight zero may have no mean."""
        return summed(self.parts(parts, shares), shares, len(self.names))

    def parts(
        self, parts: Sequence[Tensors], shares: Sequence[float]
    ) -> Iterator[StepGradients | None]:
        """Run micro-batches with what the step on their batch has drawn for their rows."""
        self.draws.first_part()
        for tensors, share in zip(parts, shares, strict=True):
            yield self._again(tensors, share) if share else None

    def _again(self, tensors: Tensors, share: float = 1.0, seed: int = 0) -> StepGradients:
        with self.draws.again():
            return self._step(tensors, share, seed)

    def repeats(self, tensors: Tensors) -> bool:
        """Whether another seed gives the same numbers, once what was drawn is given again."""
        self.draws.is_on = True
        first = self.step(tensors)
        self.draws.end_if_none()
        self.draws.first_part()
        off = difference(first, self._again(tensors, seed=1), self.names)
        return not first.is_finite or off.is_within(SAME_LOSS, SAME_GRADIENT)

    def last_of(self, parts: Sequence[Tensors]) -> StepGradients:
        """Run the last of some micro-batches, after the earlier ones have written their state."""
        *before, last = [[self._cast(t) for t in part.values()] for part in parts]
        with _kept(self.constants):
            loss, gradients = self.plain.after(before, last, 0)
        return StepGradients(float(loss), list(gradients))

    def in_float64(self) -> Trainee | None:
        """Return a copy that computes in float64; None where the module cannot be copied."""
        try:
            step, model = copy.deepcopy((self.plain.step, self.plain.model))
            step.double()  # type: ignore[attr-defined]  # a module
        except Exception:  # the user's own objects, asked for what they may not know
            return None
        return Trainee(Plain(step, model, None), is_wide=True, draws=replace(self.draws))

    @contextmanager
    def moved(self, step: StepGradients) -> Iterator[None]:
        """Move the weights against their gradients as training would; put them back at the end."""
        trained = [p for p in self.plain.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        try:
            with torch.no_grad():
                for parameter, gradient in zip(trained, step.gradients, strict=True):
                    _move(parameter, gradient)
            yield
        finally:
            with torch.no_grad():
                for parameter, numbers in zip(trained, before, strict=True):
                    parameter.copy_(numbers)


@contextmanager
def _kept(constants: Sequence[Tensor]) -> Iterator[None]:
    """Put numbers back that a step writes outside of parameters and buffers."""
    before = [tensor.detach().clone() for tensor in constants]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, numbers in zip(constants, before, strict=True):
                if not torch.equal(tensor, numbers):
                    tensor.copy_(numbers)


def summed(
    steps: Iterable[StepGradients | None], shares: Sequence[float], count: int
) -> StepGradients:
    """Add up micro-batches, whose gradients are of their shares; one of weight zero is None."""
    loss, total = 0.0, list[Tensor | None](repeat(None, count))
    for found, share in zip(steps, shares, strict=True):
        if found is not None:
            loss += share * found.loss
            total = [_sum(one, g) for one, g in zip(total, found.gradients, strict=True)]
    return StepGradients(loss, total)


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def _move(parameter: Tensor, gradient: Tensor | None) -> None:
    length = 0.0 if gradient is None else float(gradient.norm())
    if gradient is None or not 0 < length < math.inf:
        return
    room = max(float(parameter.norm()), _SMALL * math.sqrt(parameter.numel()))
    parameter -= (_MOVED * room / length) * gradient


def difference(
    whole: StepGradients, parts: StepGradients, names: Sequence[str], least: float = 1e-3
) -> Difference:
    """Compare two steps on the same weights.

    A single parameter counts only if its gradient is at least this share of all: less may be
    rounding.
    """
    pairs = zip(whole.gradients, parts.gradients, strict=True)
    apart = [_norm(one, other) for one, other in pairs]
    own = [_norm(one, None) for one in whole.gradients]
    total = math.hypot(*own) or 1.0
    shares = [off / n if n > least * total else 0.0 for off, n in zip(apart, own, strict=True)]
    worst = max(range(len(names)), key=shares.__getitem__, default=None)
    loss = abs(whole.loss - parts.loss) / (max(abs(whole.loss), abs(parts.loss)) or 1.0)
    return Difference(
        loss,
        math.hypot(*apart) / total,
        "" if worst is None else names[worst],
        0.0 if worst is None else shares[worst],
    )


def _norm(one: Tensor | None, other: Tensor | None) -> float:
    given = [_dense(t) for t in (one, other) if t is not None]
    if not given:
        return 0.0
    return float((given[0] - given[1] if len(given) > 1 else given[0]).norm())


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def micro_batches(batch: Batch, rows: int, count: int) -> list[Tensors]:
    """Cut the first rows of a batch as a bundle does: along the rows, larger parts first."""
    each, more = divmod(rows, count)
    sizes = [each + (m < more) for m in range(count)]
    return [batch.part(sum(sizes[:m]), size) for m, size in enumerate(sizes)]


def unlike_rows(batch: Batch, rows: int) -> Batch:
    """Return so many rows of a batch, in its order: those with little and those with much padding.

    Rows that count alike would hide that a mean weighs them. The commonest number of an entry is
    taken for its padding. A batch with offsets stays as it is, and its first rows are used.
    """
    if rows >= batch.rows or any(entry.per_row for entry in batch.entries):
        return batch
    own = [entry.tensor for entry in batch.entries if entry.batched]
    padding = sum((_padding(tensor) for tensor in own), torch.zeros(batch.rows))
    places = torch.linspace(0, batch.rows - 1, rows).round().long()
    chosen = padding.argsort(stable=True)[places].sort().values
    entries = (
        replace(entry, tensor=entry.tensor[chosen]) if entry.batched else entry
        for entry in batch.entries
    )
    return replace(batch, entries=tuple(entries), rows=rows)


def _padding(tensor: Tensor) -> Tensor:
    """Return the share of each row that is the commonest number of a tensor; 0 for fractions."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return torch.zeros(len(tensor))
    return (tensor == tensor.flatten().mode().values).float().flatten(1).mean(1)


def even(count: int) -> list[float]:
    """Return equal weights of micro-batches."""
    return [1 / count] * count
