"""Sums of a step where micro-batches weigh unequally, or features change what is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .gradients import StepSums
from .loss_shares import mean_loss

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .stored_weights import StoredWeights


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
