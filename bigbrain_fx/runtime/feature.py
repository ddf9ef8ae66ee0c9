"""The places of a training step where a feature takes part, or a user's own functions are called.

    setup ──▶ begin_step ──▶ begin_run ──▶ on_batch, running, compute, restore, on_send, on_recv,
          on_gradient ──▶ on_sums, may_update, after_update ──▶ end_step

A device calls its features in the order in which they were added, but those that are outermost
first. The plain pipeline of `split --bare` has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .channel import Channel

if TYPE_CHECKING:
    from .channel import Channel

_NOTHING = nullcontext()
Compute = Callable[[int, int, Mapping[str, Tensor]], Any]  # stage, micro, values -> result


class Feature:
    """Take part in a device's steps; each method does nothing here and is overridden where used."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a PlannedDevice, which knows this file
        """Prepare for a device, which has its stages and no weights yet."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its batch is read."""

    def begin_run(self) -> None:
        """Act when the messages of the step may travel, before its instructions."""

    def on_batch(self) -> None:
        """See that the device takes an input of this step's batch."""

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Return the context in which a stage runs; `phase`: forward, backward or again."""
        return _NOTHING

    def compute(self, run: Compute, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Run a stage forward, by `run` or otherwise; return its result."""
        return run(stage, micro, values)

    def restore(self, stage: int, micro: int, kept: Any) -> Any:  # noqa: ANN401  # what `compute` kept
        """Return what a backward starts from, of what the forward has kept for it."""
        return kept

    def on_send(self, channel: Channel, tensor: Tensor) -> None:
        """See a tensor before it is sent."""

    def on_recv(self, channel: Channel, tensor: Tensor) -> None:
        """See a tensor that has come, before it is used."""

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

    def end_step(self, step: int) -> None:
        """Act after all messages of the step have left."""


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


AtStep = Callable[[Any, int], None]  # a Device (of an inference bundle, an InferenceDevice), step
AtMessage = Callable[[Any, "Channel", Tensor], None]


@dataclass
class Hooks:
    """Functions to call, in their order, in every process.

    A device that starts again after a death calls them again for the steps that it repeats. One
    that takes its state from a peer goes on after the peer's last `on_step_end`, and calls none for
    that step; with a function in `on_step_begin` snapshots are kept instead.

    Attributes:
        on_step_begin: with the device and the step, before anything of the step.
        on_step_end: the same, after the optimizer's step and when all sends have left. This is the
            recovery point: under a supervisor, snapshots are taken right after these functions.
        on_send: with the device, the channel and the tensor, before it is logged and sent; not
            where a gradient is None.
        on_recv: the same, when a message has come; the tensor is used after this.
    """

    on_step_begin: list[AtStep] = field(default_factory=list)
    on_step_end: list[AtStep] = field(default_factory=list)
    on_send: list[AtMessage] = field(default_factory=list)
    on_recv: list[AtMessage] = field(default_factory=list)


class HookCalls(Feature):
    """Call a device's hooks, those that it has at the time of the call."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # see `AtStep`
        """Prepare for a device, whose `hooks` may change at any time."""
        self.device = device

    def begin_step(self, step: int) -> None:
        """Call the functions of on_step_begin."""
        for at_begin in self.device.hooks.on_step_begin:
            at_begin(self.device, step)

    def end_step(self, step: int) -> None:
        """Call the functions of on_step_end."""
        for at_end in self.device.hooks.on_step_end:
            at_end(self.device, step)

    def on_send(self, channel: Channel, tensor: Tensor) -> None:
        """Call the functions of on_send."""
        for at_send in self.device.hooks.on_send:
            at_send(self.device, channel, tensor)

    def on_recv(self, channel: Channel, tensor: Tensor) -> None:
        """Call the functions of on_recv."""
        for at_recv in self.device.hooks.on_recv:
            at_recv(self.device, channel, tensor)
