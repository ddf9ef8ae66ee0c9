"""Numbers that are not finite: found before they reach a parameter.

    stop     the device that finds one ends the run: the same numbers would come again
    skip     all devices leave the update out if any of them finds one: they vote before it
    ignore   training goes on, as torch by itself does

The check covers the losses and each stage's gradients, before they are clipped.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .coded import CodedError

NOT_FINITE = 65  # exit code: EX_DATAERR of sysexits.h
POLICIES = ("stop", "skip", "ignore")


class NotFiniteError(CodedError, ArithmeticError):
    """Report a loss or a gradient that is not finite: step, stage, and micro-batch or parameter."""


def not_finite(
    step: int,
    loss_stage: int | None,
    losses: Mapping[int, Tensor],
    gradients: Mapping[tuple[str, int], Tensor],
) -> str | None:
    """Return which number of a step is not finite; None: all are.

    Args:
        step: its number.
        loss_stage: where the losses are made.
        losses: by micro-batch, if they are made here.
        gradients: (parameter, stage) -> sum over micro-batches.
    """
    for micro, loss in zip(losses, _numbers([*losses.values()]), strict=True):
        if not math.isfinite(loss):
            return (
                f"step {step}, stage {loss_stage}, micro-batch {micro}: "
                f"the loss is {loss}, not a finite number"
            )
    if _have_finite_sums(gradients.values()):
        return None
    for (name, stage), gradient in gradients.items():  # a sum may be infinite though no element is
        if not torch.isfinite(gradient).all():
            return f"step {step}, stage {stage}: the gradient of {name} is not finite"
    return None


def _have_finite_sums(tensors: Iterable[Tensor]) -> bool:
    """Return whether all sums are finite: reads each tensor once, and waits once for each dtype."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for total in map(_sum, tensors):
        alike.setdefault((total.dtype, total.device), []).append(total)
    return all(all(map(cmath.isfinite, _numbers(same))) for same in alike.values())


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return scalars of one dtype and device as numbers: a GPU is waited for once."""
    found: list[float] = torch.stack(tuple(scalars)).flatten().tolist() if scalars else []
    return found


def _sum(gradient: Tensor) -> Tensor:
    return gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32))
