"""Sums of a step that copy no gradient which nobody else holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .gradients import StepSums, laid_out
from .only_holder import is_alone


@dataclass
class DeviceSums(StepSums):
    """One step's sums on a device."""

    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

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
        self._own_all()
        return super().summed()

    def clear(self) -> None:
        """Forget the gradients: they were used."""
        super().clear()
        self._counts.clear()
