"""Places of a training step where a user's own functions are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .feature import Feature

if TYPE_CHECKING:
    from .channel import Channel

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
