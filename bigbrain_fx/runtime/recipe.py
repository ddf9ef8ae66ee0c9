"""What the user's file says about training, as the bundle's `training.py` has it."""

from __future__ import annotations

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
    clip_norm: float | None = None
    scheduler: MakeScheduler | None = None
    grad_scaler: Mapping[str, Any] | None = None  # arguments of `LossScale`


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Make torch's AdamW as it comes, which is used where the model file names no optimizer."""
    return torch.optim.AdamW(list(named))
