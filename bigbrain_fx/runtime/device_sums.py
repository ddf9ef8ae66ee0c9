"""Sums of a step where micro-batches weigh unequally, or features change what is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from .gradients import StepSums, laid_out
from .loss_shares import mean_loss
from .only_holder import is_alone

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .stored_weights import StoredWeights


@dataclass
class DeviceSums(StepSums):
    """One step's sums on a device of any plan.

    Attributes:
        stored: where weights, and so gradients, are offloaded; None: they stay on the device.
        weights: of the step's micro-batches in its loss; empty: equal.
        on_sums: what features make of the gradients that were added up.
    """

    stored: StoredWeights | None = None
    weights: Sequence[float] = ()
    on_sums: Sequence[Callable[[dict[str, Tensor]], dict[str, Tensor]]] = ()
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """Return the mean loss of the step's micro-batches by their weights."""
        return mean_loss([self.losses[micro] for micro in sorted(self.losses)], self.weights)

    def add(self, name: str, stage: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.

        It is laid out as `.grad` would be. The first sum makes a new tensor where something else
        holds the one that autograd has handed out.
        """
        key = name, stage
        count = self._counts.get(key, 0)
        if count == 0:
            like = self.held.parameters.get(name)
            self.gradients[key] = gradient if like is None else laid_out(gradient, like)
        elif count == 1 and not is_alone(self.gradients, key):
            self.gradients[key] = self.gradients[key] + gradient
        else:
            self.gradients[key].add_(gradient)
        self._counts[key] = count + 1

    def _own_all(self) -> None:
        """Let no gradient be another one's memory, too: an optimizer may write into it.

        autograd hands out one tensor for both sides of a sum, and parts of one memory where it was
        stacked. (Of those, where they lie as their parameters do, torch's own `.grad` are one
        memory, too: clipping and sums of micro-batches write there several times. `verify` says
        so.) What was added up is a tensor anew.
        """
        for key, count in self._counts.items():
            if count == 1 and key in self.gradients and not is_alone(self.gradients, key):
                self.gradients[key] = self.gradients[key].clone()

    def summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        if self.stored is None:  # offloaded, each has its place
            self._own_all()
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

    def clear(self) -> None:
        """Forget the gradients: they were used."""
        super().clear()
        self._counts.clear()
