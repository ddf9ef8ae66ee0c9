"""Learning rates that go back to those of a step: after a death, a resumption, on other devices.

A scheduler has no state of its own here. It depends on its number of steps and on nothing else: a
new one reaches the rates of the old one by as many steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .recipe import LearningRates, LrScale, MakeScheduler, Optimizer


class RewindableRates(LearningRates):
    """Learning rates that can be set as after any number of steps; see `LearningRates`."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        lr_scale: LrScale | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        groups = optimizer.param_groups if optimizer is not None else []
        self._as_made = [_hyper(group) for group in groups]
        self._made = optimizer, scheduler
        super().__init__(optimizer, lr_scale, scheduler)

    def rewind(self, finished: int) -> None:
        """Be as after so many steps, whatever was before."""
        optimizer, scheduler = self._made
        if optimizer is None or scheduler is None:
            return
        for group, made in zip(self.groups, self._as_made, strict=True):
            for key in _hyper(group):
                del group[key]
            group.update({key: _own(value) for key, value in made.items()})  # written in place
        self.scheduler = scheduler(optimizer)
        with warnings.catch_warnings():  # torch misses the optimizer's own steps
            warnings.simplefilter("ignore")
            for _ in range(finished):
                self.scheduler.step()


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {k: _own(v) for k, v in group.items() if k not in ("params", "param_names")}


def _own(value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    return value.clone() if isinstance(value, torch.Tensor) else value
