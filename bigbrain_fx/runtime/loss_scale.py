"""A loss scale that finds itself: `torch.amp.GradScaler` over all devices.

    loss x scale ──▶ backward ──▶ gradients / scale ──▶ clip, update
                                        │ one is not finite, on any device:
                                        ▼
                           no device updates; the scale falls

float16 has no numbers below 6e-8: small gradients would be zero. Every device has the scale, and
all make the same changes, because they vote on each step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .feature import Feature
from .finite import NotFiniteError

if TYPE_CHECKING:
    from .device import Device

LEAST = 2.0**-16  # a scale below it: the numbers are not finite at any scale
TINIEST = 2.0**-126  # of float32: a scale of zero has no reciprocal


class LossScale:
    """The scale of this step's loss, and how it changes.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: as of `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = _single(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.healthy = 0  # steps since the scale changed

    def update(self, all_finite: bool) -> None:
        """Change the scale after a step: it falls at once, and grows after many good steps."""
        self.healthy = self.healthy + 1 if all_finite else 0
        if not all_finite:
            self.scale = max(_single(self.scale * self.backoff_factor), TINIEST)
        elif self.healthy == self.growth_interval:
            grown = _single(self.scale * self.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.healthy = 0

    def unscaled(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients of the loss itself; `gradients` is emptied."""
        return unscaled(gradients, self.scale)

    def may_update(self, device: Device, fine: bool) -> bool:
        """Say whether all devices have finite gradients; else the scale falls.

        Raises:
            NotFiniteError: it has fallen too far, and the policy is to stop.
        """
        fine = device.transport.vote(device.step, device.name, fine, device.names)
        self.update(fine)
        if not fine and self.scale < LEAST and device.on_nan == "stop":
            raise NotFiniteError(
                f"step {device.step}: the loss or a gradient is not finite, and the loss scale has "
                f"fallen to {self.scale:g} for it (device {device.name})",
                code="BX5036",
            )
        return fine

    def facts(self) -> list[float]:
        """Return what a commit keeps."""
        return [self.scale, self.healthy]

    def restore(self, facts: Iterable[float] | None) -> None:
        """Go on from what a commit kept; without it, as it was made."""
        if facts is not None:
            scale, healthy = facts
            self.scale, self.healthy = float(scale), int(healthy)


class ScaledLoss(Feature):
    """Use gradients of the loss itself, where all devices have finite ones."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a Device, which knows this file
        """Prepare for a device, which has its scale."""
        self.device = device
        self.found: dict[str, Tensor] | None = None  # this step's
        self.is_finite = True

    def begin_step(self, step: int) -> None:
        """Forget the gradients of the step before."""
        self.found = None

    def on_sums(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients without the scale; the memory of those with it is free then."""
        if self.found is None:
            self.is_finite = are_finite(found.values())
            self.device._now.gradients.clear()
            self.found = self.device.loss_scale.unscaled(found)
        return self.found

    def may_update(self) -> bool:
        """Whether all devices have finite gradients; else the scale falls."""
        self.device._now.summed()
        return bool(self.device.loss_scale.may_update(self.device, self.is_finite))

    def after_update(self) -> None:
        """Forget the gradients: they were used."""
        self.found = None


def unscaled(gradients: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return gradients of the loss itself; `gradients` is emptied, so that memory is free."""
    factor = _single(1.0 / scale)
    return {name: gradients.pop(name) * factor for name in list(gradients)}


def _single(value: float) -> float:
    """Round to float32, which torch keeps the scale in."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
