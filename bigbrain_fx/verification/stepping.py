"""The user's optimizer as plain PyTorch code steps it: rates set, schedulers advanced.

It knows parameters and their gradients; who makes those, and a loss scale, are others'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bigbrain_fx.runtime import Training


class Stepper:
    """An optimizer of some parameters, with the rates that the model file asks for."""

    def __init__(self, training: Training, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.training = parameters, training
        self.optimizer = training.optimizer(list(parameters.items()))
        self.base = [group["lr"] for group in self.optimizer.param_groups]
        make: Any = getattr(training, "scheduler", None)
        self.scheduler = make(self.optimizer) if make else None

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Give each parameter its gradient, or none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    @property
    def given(self) -> dict[str, Tensor]:
        """What its parameters' gradients are now."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def set_rate(self, step: int) -> None:
        """Set the rates of a step."""
        if self.training.lr_scale is not None:
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * self.training.lr_scale(step)

    def end(self) -> None:
        """End a step, updated or not."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
