"""The places of a training step where a feature of a plan takes part.

    setup ──▶ begin_step ──▶ begin_run ──▶ running, compute, restore, on_gradient
          ──▶ on_sums, may_update, after_update

A device calls its features in the order in which they were added, but those that are outermost
first. A plain pipeline has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

_NOTHING = nullcontext()
Compute = Callable[[int, int, Mapping[str, Tensor]], Any]  # stage, micro, values -> result


class Feature:
    """Take part in a device's steps; each method does nothing here and is overridden where used."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a PlannedDevice, which knows this file
        """Prepare for a device, which has its stages and no weights yet."""
        self.device = device

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its batch is read."""

    def begin_run(self) -> None:
        """Act when the messages of the step may travel, before its instructions."""

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Return the context in which a stage runs; `phase`: forward, backward or again."""
        return _NOTHING

    def compute(self, run: Compute, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Run a stage forward, by `run` or otherwise; return its result."""
        return run(stage, micro, values)

    def restore(self, stage: int, micro: int, kept: Any) -> Any:  # noqa: ANN401  # what `compute` kept
        """Return what a backward starts from, of what the forward has kept for it."""
        return kept

    def on_gradient(self, name: str, stage: int, micro: int, gradient: Tensor) -> bool:
        """Take a parameter's gradient of one micro-batch; False: it is added up on the device."""
        return False

    def on_sums(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients to use, of those that were added up; it may be asked again."""
        return found

    def may_update(self) -> bool:
        """Decide, with all devices, whether this step's numbers are fit to update with."""
        return True

    def after_update(self) -> None:
        """Finish what the optimizer's step, or its omission, completes."""


class Features:
    """The features of one device, by what they take part in."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {}

    def add(self, feature: Feature, device: Any, *, outermost: bool = False) -> None:  # noqa: ANN401
        """Add a feature; only the methods that it overrides are called."""
        feature.setup(device)
        for name in vars(Feature):
            if getattr(type(feature), name) is not getattr(Feature, name):
                calls = self._calls.setdefault(name, [])
                calls.insert(0 if outermost else len(calls), getattr(feature, name))

    def __getitem__(self, name: str) -> list[Callable[..., Any]]:
        """Return the methods of this name, in the order of the features."""
        return self._calls.get(name, [])
