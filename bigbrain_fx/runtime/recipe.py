"""How a model is trained, as `training.py` of the bundle says it: optimizer, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Optimizer = torch.optim.Optimizer
LrScale = Callable[[int], float]
MakeScheduler = Callable[[Optimizer], Any]  # anything with `step()`


@dataclass(frozen=True)
class Training:
    """How a model is trained; see `training.py` of the bundle."""

    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
    lr_scale: LrScale | None = None
    clip_norm: Any = None  # a number, or what gives it at each step of the user's own
    scheduler: MakeScheduler | None = None
    grad_scaler: Mapping[str, Any] | None = None  # arguments of `LossScale`


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Make torch's AdamW as it comes, which is used where the model file names no optimizer."""
    return torch.optim.AdamW(list(named))


class LearningRates:
    """Sets an optimizer's learning rates, before and after its steps.

    `lr_scale(step)` is a factor on every rate; `scheduler` makes a scheduler of the optimizer,
    which is stepped after every training step. Without an optimizer nothing is set.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        lr_scale: LrScale | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        self.groups = optimizer.param_groups if optimizer is not None else []
        self.base: list[Any] = [g.get("lr") for g in self.groups]  # None: rates are kept elsewhere
        self.lr_scale = lr_scale
        wanted = optimizer is not None and scheduler is not None
        self.scheduler = scheduler(optimizer) if wanted else None  # type: ignore[misc, arg-type]

    def set(self, step: int) -> None:
        """Set the rates of a step."""
        if self.lr_scale is None:
            return
        scale = self.lr_scale(step)
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * scale

    def advance(self) -> None:
        """A step has ended: the scheduler takes its own."""
        if self.scheduler is not None:
            self.scheduler.step()
