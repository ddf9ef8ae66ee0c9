"""Optimizers and schedulers whose `step` asks for more than a plain call."""

from __future__ import annotations

import inspect
from typing import Any

from .recipe import Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` asks for a closure that computes the loss again, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def needs_metrics(scheduler: Any) -> bool:  # noqa: ANN401  # of any kind
    """Whether `step` of a scheduler asks for the loss, as that of ReduceLROnPlateau does."""
    metrics = inspect.signature(scheduler.step).parameters.get("metrics")
    return metrics is not None and metrics.default is inspect.Parameter.empty
