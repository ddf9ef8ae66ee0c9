"""Sums of a step where micro-batches weigh unequally, or features change what is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .gradients import StepSums

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .stored_weights import StoredWeights


def mean_loss(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return a step's loss from those of its micro-batches and their weights: rows, or a count.

    Losses of sixteen bits are added in 32: it is for a look alone.
    """
    weights = weights or (1,) * len(losses)
    losses = [loss.float() if loss.dtype.itemsize < 4 else loss for loss in losses]
    if len(set(weights) - {0}) > 1:
        shares = [share_of(loss, weights, micro) for micro, loss in enumerate(losses)]
        return torch.stack(shares).sum()
    pairs = zip(losses, weights, strict=True)
    return torch.stack([loss for loss, weight in pairs if weight]).mean()


def share_of(loss: Tensor, weights: Sequence[float], micro: int) -> Tensor:
    """Return what a micro-batch's loss, or the gradient it starts from, is of the step's."""
    counted = [weight for weight in weights if weight]
    if not weights[micro]:
        return torch.zeros_like(loss)
    if len(set(counted)) == 1:
        return loss / len(counted)
    return loss * (weights[micro] / sum(counted))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ANN401  # torch's own
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # noqa: ANN401
        return None


def nothing_of(value: Tensor) -> Tensor:
    """Return what a backward starts from that comes to a value without a gradient for it.

    To leave the value out would not do: a Function before it is run all the same, given zeros.
    """
    found: Tensor = _Nothing.apply(value)  # type: ignore[no-untyped-call]  # torch has it so
    return found


@dataclass
class PlannedSums(StepSums):
    """One step's sums on a device of any plan.

    Attributes:
        stored: where weights, and so gradients, are offloaded; None: they stay on the device.
        weights: of the step's micro-batches in its loss; empty: equal.
        on_sums: what features make of the gradients that were added up.
    """

    stored: StoredWeights | None = None
    weights: Sequence[float] = ()
    on_sums: Sequence[Callable[[dict[str, Tensor]], dict[str, Tensor]]] = ()

    def loss(self) -> Tensor:
        """Return the mean loss of the step's micro-batches by their weights."""
        return mean_loss([self.losses[micro] for micro in sorted(self.losses)], self.weights)

    def summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        found = super().summed()
        if self.stored is not None:
            self.stored.leave_all(self.gradients)  # those of tied ones were read
        for on_sums in self.on_sums:
            found = on_sums(found)
        return found

    def _norm(self, gradient: Tensor | None, parameter: Tensor) -> Tensor:
        found = super()._norm(gradient, parameter)
        if self.stored is not None and gradient is not None:
            self.stored.leave(gradient)
        return found
