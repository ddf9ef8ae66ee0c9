"""The learning rates of one optimizer by step: as it made them, times a factor, or a scheduler's.

A scheduler has no state of its own here. It depends on how often it was stepped and on nothing
else, so one that is made anew goes where the old one was by as many steps: after a death, a
resumption, or on other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Optimizer = torch.optim.Optimizer
LrScale = Callable[[int], float]
MakeScheduler = Callable[[Optimizer], Any]  # anything with `step()`


class LearningRates:
    """Sets an optimizer's learning rates, before and after its steps.

    Args:
        optimizer: None on a device without parameters: nothing is set.
        lr_scale: step -> a factor on every rate.
        scheduler: makes a scheduler of the optimizer; it is stepped after every training step,
            whether or not that one updated anything.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        lr_scale: LrScale | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        self.groups = optimizer.param_groups if optimizer is not None else []
        self.base = [group["lr"] for group in self.groups]
        self.lr_scale = lr_scale
        self._as_made = [_hyper(group) for group in self.groups]
        self._make: Callable[[], Any] | None = None
        if optimizer is not None and scheduler is not None:
            self._make = partial(scheduler, optimizer)
        self._scheduler = self._make() if self._make else None

    @property
    def scheduler(self) -> Any:  # noqa: ANN401  # of any kind
        """The user's scheduler; None where there is none."""
        return self._scheduler

    def set(self, step: int) -> None:
        """Set the rates of a step."""
        if self.lr_scale is None:
            return
        scale = self.lr_scale(step)
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * scale

    def advance(self) -> None:
        """A step has ended: the scheduler takes its own."""
        if self._scheduler is not None:
            self._scheduler.step()

    def rewind(self, finished: int) -> None:
        """Be as after so many steps, whatever was before."""
        if self._make is None:
            return
        for group, made in zip(self.groups, self._as_made, strict=True):
            for key in _hyper(group):
                del group[key]
            group.update({key: _own(value) for key, value in made.items()})  # written in place
        self._scheduler = self._make()
        with warnings.catch_warnings():  # torch misses the optimizer's own steps
            warnings.simplefilter("ignore")
            for _ in range(finished):
                self._scheduler.step()


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {k: _own(v) for k, v in group.items() if k not in ("params", "param_names")}


def _own(value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    return value.clone() if isinstance(value, torch.Tensor) else value
