"""What one step gathers on a device: losses, and gradients summed over micro-batches and stages.

It knows no schedule, no messages and no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .coded import MisuseError
from .gradients import laid_out, norm, summed
from .held_weights import HeldWeights
from .loss_scale import LossScale, are_finite, unscaled
from .loss_shares import mean_loss
from .only_holder import is_alone

if TYPE_CHECKING:  # only bundles that offload weights have it
    from .stored_weights import StoredWeights


@dataclass
class StepSums:
    """One step's.

    Attributes:
        held: whose gradients they are.
        losses: by micro-batch.
        gradients: of each parameter and stage, what is added up so far.
        norms: of gradients, by the name that has an owner.
        unscaled: with a loss scale: the gradients as they are used.
        finite: whether they were, before that.
    """

    held: HeldWeights
    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    unscaled: dict[str, Tensor] | None = None
    finite: bool = True
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def loss(self, weights: Sequence[float]) -> Tensor:
        """Return the mean loss of the step's micro-batches by their weights."""
        return mean_loss([self.losses[micro] for micro in sorted(self.losses)], weights)

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

    def summed(
        self, scale: LossScale | None, weights: StoredWeights | None = None
    ) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        if self.unscaled is not None:
            return self.unscaled
        if weights is None:  # in a store each has its place
            self._own_all()
        stages_of = {name: self.held.stages_of(name) for name in self.held.parameters}
        found = summed(self.gradients, stages_of)
        if weights is not None:
            weights.leave_all(self.gradients)  # those of tied ones were read
        if scale is not None:
            self.finite = are_finite(found.values())
            self.gradients.clear()
            self.unscaled = found = unscaled(found, scale.scale)
        return found

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

    def own_norms(self, scale: LossScale | None, weights: StoredWeights | None = None) -> Tensor:
        """Return the norms of the gradients that this device answers for, and keep them."""
        found = self.summed(scale, weights)
        owned = self.held.owned_by(self.held.device)
        norms = []
        for name in map(self.held.parameter_of, owned):
            gradient = found.get(name)
            norms.append(norm(gradient, self.held.parameters[name]))
            if weights is not None and gradient is not None:
                weights.leave(gradient)
        self.norms.update(zip(owned, norms, strict=True))
        return torch.stack(norms)

    def take_norms(self, device: str, norms: Tensor) -> None:
        """Take the norms of the gradients that another device answers for."""
        self.norms.update(zip(self.held.owned_by(device), norms.unbind(), strict=True))

    def all_norms(self) -> list[Tensor]:
        """Return the norms of all gradients of the model, in its order.

        Raises:
            MisuseError: a device sends none.
        """
        lacking = [owner for name, owner in self.held.owner.items() if name not in self.norms]
        if lacking:
            raise MisuseError(
                f"clipping needs the norms of device {lacking[0]}, which sends none: "
                "split the model again with clip_norm in its file",
                code="BX5162",
            )
        return [self.norms[name] for name in self.held.owner]

    def clear(self) -> None:
        """Forget the gradients: they were used."""
        self.gradients.clear()
        self._counts.clear()
        self.unscaled = None
