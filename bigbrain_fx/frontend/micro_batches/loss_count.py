"""Count of a batch by which its micro-batches must weigh to add up to it.

    gradient of the whole = w0 * gradient of part 0 + w1 * gradient of part 1 + ...

Least squares gives w. An entry of the batch with counts in that proportion explains w: labels that
are not ignored, a mask's ones. The user's own count is checked the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.core import LossCount
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.micro_batches.gradients import (
    StepGradients,
    Tensors,
    Trainee,
    micro_batches,
)
from bigbrain_fx.frontend.translation.batch import Batch, Entry, fill

_FITS = 2e-3  # of the gradient: what least squares may leave
_IGNORED = (-100, 0, -1)
_ADDS_UP = 1e-6
_HELP = (
    "return one number per batch, the elements that the loss is a mean over: "
    'def loss_weight(batch): return (batch["labels"] != -100).sum()'
)


def fitted_shares(trainee: Trainee, whole: Tensors, parts: Sequence[Tensors]) -> list[float] | None:
    """Return the weights by which the parts' gradients add up to the batch's, or None."""
    target = trainee.step(whole)
    steps = [step for step in trainee.parts(parts, [1.0] * len(parts)) if step is not None]
    gram = torch.tensor([[_dot(one, other) for other in steps] for one in steps]).double()
    right = torch.tensor([_dot(step, target) for step in steps]).double()
    found = torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]
    square = _dot(target, target)
    left = square - 2 * float(found @ right) + float(found @ gram @ found)
    fits = square > 0 and math.sqrt(max(0.0, left) / square) <= _FITS
    return [float(share) for share in found] if fits and bool((found >= 0).all()) else None


def _dot(one: StepGradients, other: StepGradients) -> float:
    pairs = zip(one.gradients, other.gradients, strict=True)
    found = (_product(a, b) for a, b in pairs if a is not None and b is not None)
    return sum(found, 0.0)


def _product(one: Tensor, other: Tensor) -> float:
    a, b = (g if g.layout == torch.strided else g.to_dense() for g in (one, other))
    return float(torch.sum(a.double() * b.double()))


def explained(batch: Batch, parts: Sequence[Tensors], shares: Sequence[float]) -> LossCount | None:
    """Return the count of an entry that is in the proportion of these weights."""
    for entry in batch.entries:
        for count in _counts(entry):
            found = [count_of(count, batch, part) for part in parts]
            if sum(found) > 0 and _are_in_proportion(found, shares):
                return count
    return None


def _counts(entry: Entry) -> Iterator[LossCount]:
    """Yield the possible counts of an entry."""
    tensor = entry.tensor
    if not entry.batched or tensor.is_complex():
        return
    if tensor.dtype == torch.bool or _is_mask(tensor):
        yield LossCount(entry.key)
    if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool:
        for ignored in _IGNORED:
            if bool((tensor == ignored).any()):
                yield LossCount(entry.key, 0, ignored)
                if tensor.dim() > 1:
                    yield LossCount(entry.key, 1, ignored)


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def count_of(count: LossCount, batch: Batch, part: Tensors) -> float:
    """Return the count of a micro-batch."""
    return float(count.of(fill(batch.template, part)))


def counts_by_row(function: Callable[[Any], object], batch: Batch) -> Tensor:
    """Return the count of each row of a batch; a micro-batch's count is the sum of its rows'.

    Raises:
        InputError: the rows' counts do not add up to the batch's.
    """
    count = count_by(function, batch)
    whole, *rows = [
        *micro_batches(batch, batch.rows, 1),
        *micro_batches(batch, batch.rows, batch.rows),
    ]
    require_additive(count, whole, rows)
    return torch.tensor([count(row) for row in rows], dtype=torch.float64)


def _are_in_proportion(counts: Sequence[float], shares: Sequence[float]) -> bool:
    total = sum(counts)
    pairs = zip(counts, shares, strict=True)
    return all(abs(count / total - share) <= _FITS for count, share in pairs)


def count_by(function: Callable[[Any], object], batch: Batch) -> Callable[[Tensors], float]:
    """Return the user's `loss_weight` as a function of a micro-batch's tensors.

    Raises:
        InputError: when it is called: its result is no number, negative, NaN or infinite.
    """

    def count(part: Tensors) -> float:
        return number_of_count(function(fill(batch.template, part)))

    return count


def number_of_count(value: object) -> float:
    """Return the number that `loss_weight` has given.

    Raises:
        InputError: it is none that a batch may weigh.
    """
    if isinstance(value, Tensor) and value.dim():
        raise InputError(
            f"loss_weight(batch) must return one number, found a tensor of shape "
            f"{tuple(value.shape)}",
            code="BX2162",
            help=_HELP,
        )
    if not isinstance(value, int | float | Tensor):
        raise InputError(
            f"loss_weight(batch) must return a number, found {type(value).__name__}",
            code="BX2190",
            help=_HELP,
        )
    found = float(value)
    if not math.isfinite(found) or found < 0:
        raise InputError(
            f"loss_weight(batch) must be finite and not negative, found {found}",
            code="BX2191",
            help=_HELP,
        )
    return found


def require_additive(
    count: Callable[[Tensors], float], whole: Tensors, parts: list[Tensors]
) -> None:
    """Refuse a `loss_weight` of which a batch has another one than its micro-batches together.

    Raises:
        InputError: it has; or the example batch weighs nothing.
    """
    total, found = count(whole), [count(part) for part in parts]
    if not total > 0:
        raise InputError(
            "loss_weight(batch) is 0: nothing would be trained on",
            code="BX2192",
            help=_HELP,
        )
    if abs(total - sum(found)) > _ADDS_UP * total:
        listed = " + ".join(f"{each:g}" for each in found)
        raise InputError(
            f"loss_weight(batch) must add up over micro-batches: {total:g} of the whole batch, "
            f"{listed} of its parts",
            code="BX2193",
            help=_HELP,
        )
