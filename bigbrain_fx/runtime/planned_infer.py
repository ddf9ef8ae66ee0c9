"""Inference of any plan: tensor groups, torch.compile, parts of tensors, messages that vary."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .infer import EvalDevice
from .planned_device import PlannedDevice


class InferenceDevice(EvalDevice, PlannedDevice):
    """Run one device's part of every batch, forward only, with what any plan may ask for."""

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward."""
        with self._running(stage, micro, "forward"):
            return super().forward(stage, micro, **values)
