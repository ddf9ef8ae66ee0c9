"""The places of a training step where a feature takes part: replicas, hooks, checks of numbers.

    setup ──▶ begin_step ──▶ on_batch, running, on_send, on_recv, on_gradient
          ──▶ after_update ──▶ end_step

A device calls its features in the order in which they were added. The plain pipeline of
`split --bare` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from .channel import Channel

_NOTHING = nullcontext()


class Feature:
    """Take part in a device's steps; each method does nothing here and is overridden where used."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a PlannedDevice, which knows this file
        """Prepare for a device, which has its stages and no weights yet."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its batch is read."""

    def on_batch(self) -> None:
        """See that the device takes an input of this step's batch."""

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Return the context in which a stage runs; `phase`: forward, backward or again."""
        return _NOTHING

    def on_send(self, channel: Channel, tensor: Tensor) -> None:
        """See a tensor before it is sent."""

    def on_recv(self, channel: Channel, tensor: Tensor) -> None:
        """See a tensor that has come, before it is used."""

    def on_gradient(self, name: str, stage: int, micro: int, gradient: Tensor) -> bool:
        """Take a parameter's gradient of one micro-batch; False: it is added up on the device."""
        return False

    def after_update(self) -> None:
        """Finish what the optimizer's step, or its omission, completes."""

    def end_step(self, step: int) -> None:
        """Act after all messages of the step have left."""


class Features:
    """The features of one device, by what they take part in."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {}

    def add(self, feature: Feature, device: Any) -> None:  # noqa: ANN401  # see `Feature.setup`
        """Add a feature; only the methods that it overrides are called."""
        feature.setup(device)
        for name in vars(Feature):
            if getattr(type(feature), name) is not getattr(Feature, name):
                self._calls.setdefault(name, []).append(getattr(feature, name))

    def __getitem__(self, name: str) -> list[Callable[..., Any]]:
        """Return the methods of this name, in the order of the features."""
        return self._calls.get(name, [])
