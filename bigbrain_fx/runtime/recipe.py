"""What the user's file says about training, as the bundle's `training.py` has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .rates import LrScale, MakeScheduler

Optimizer = torch.optim.Optimizer


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


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` asks for a closure that computes the loss again, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def needs_metrics(scheduler: Any) -> bool:  # noqa: ANN401  # of any kind
    """Whether `step` of a scheduler asks for the loss, as that of ReduceLROnPlateau does."""
    metrics = inspect.signature(scheduler.step).parameters.get("metrics")
    return metrics is not None and metrics.default is inspect.Parameter.empty
