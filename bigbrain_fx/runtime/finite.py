"""Numbers that are not finite: found before they reach a parameter.

    stop     the device that finds one ends the run: the same numbers would come again
    skip     all devices leave the update out if any of them finds one: they vote before it
    ignore   training goes on, as torch by itself does

What is looked at are the losses and each stage's gradients, before they are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NOT_FINITE = 65  # exit code: EX_DATAERR of sysexits.h
POLICIES = ("stop", "skip", "ignore")


class NotFiniteError(ArithmeticError):
    """Report a loss or a gradient that is not finite: step, stage, and micro-batch or parameter."""


def not_finite(
    step: int,
    loss_stage: int | None,
    losses: Sequence[Tensor],
    gradients: Mapping[tuple[str, int], Tensor],
) -> str | None:
    """Return which number of a step is not finite; None: all are.

    Args:
        step: its number.
        loss_stage: where the losses are made.
        losses: of each micro-batch, if they are made here.
        gradients: (parameter, stage) -> sum over micro-batches.
    """
    for micro, loss in enumerate(losses):
        if not torch.isfinite(loss).all():
            return (
                f"step {step}, stage {loss_stage}, micro-batch {micro}: "
                f"the loss is {float(loss)}, not a finite number"
            )
    for (name, stage), gradient in _suspects(gradients).items():
        if not torch.isfinite(gradient).all():
            return f"step {step}, stage {stage}: the gradient of {name} is not finite"
    return None


def _suspects(gradients: Mapping[tuple[str, int], Tensor]) -> Mapping[tuple[str, int], Tensor]:
    """Return all gradients if the sum of any is not finite: reads each once, and waits once.

    A sum may be infinite though no element is; then they are looked at one by one.
    """
    flags = [torch.isfinite(_sum(gradient)) for gradient in gradients.values()]
    return gradients if flags and not torch.stack(flags).all() else {}


def _sum(gradient: Tensor) -> Tensor:
    return gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32))
