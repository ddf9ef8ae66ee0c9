"""A device that calls functions of the user's around its steps, and compares its batches.

Copied into all bundles but those of `split --bare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .channel import Channel
from .compared_stream import AgreeingTransport, ComparedStream, Subject
from .forward_device import ForwardDevice

AtStep = Callable[[Any, int], None]  # a Device (of an inference bundle, an InferenceDevice), step
AtMessage = Callable[[Any, Channel, Tensor], None]


@dataclass
class Hooks:
    """Functions to call, in their order, in every process.

    A device that starts again after a death calls them again for the steps that it repeats. One
    that takes its state from a peer goes on after the peer's last `on_step_end`. It calls none for
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


class HookedDevice(ForwardDevice):
    """Run one device's part of every step.

    Attributes:
        names: all devices, by rank.
        stream_type: what gives it its batches; checked ones, where the bundle has `data`.
    """

    names: tuple[str, ...] = ()
    stream_type: type[ComparedStream] = ComparedStream
    transport: AgreeingTransport
    stream: ComparedStream

    def __init__(
        self, transport: AgreeingTransport, stream: ComparedStream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.finished = 0  # steps
        self.hooks = Hooks()
        self.of_run: dict[str, int] = {}  # what its files of --save say they are of
        self._compared = -1  # the step whose batch was

    def run_step(self, step: int) -> Tensor | None:
        """Run one step; return its loss, the mean over its rows, where one is reported."""
        loss = super().run_step(step)
        self.finished = step + 1
        for at_end in self.hooks.on_step_end:
            at_end(self, step)
        return loss

    def _begin(self, step: int) -> None:
        for at_begin in self.hooks.on_step_begin:
            at_begin(self, step)
        self._compared = -1  # a step may be begun again
        super()._begin(step)

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch; all devices must have the same batch."""
        if self._compared != self.step:
            self.transport.agree(Subject(self.step), self.stream.digest(), self.name)
            self._compared = self.step
        return super().batch(name, micro)

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        for at_send in self.hooks.on_send:
            at_send(self, channel, tensor)
        self._send_as_is(channel, tensor)

    def _send_as_is(self, channel: Channel, tensor: Tensor) -> None:
        super()._send(channel, tensor)

    def _receive(self, channel: Channel) -> Any:  # noqa: ANN401  # a tensor, or None
        tensor = self._receive_as_is(channel)
        if tensor is not None:
            for at_recv in self.hooks.on_recv:
                at_recv(self, channel, tensor)
        return tensor

    def _receive_as_is(self, channel: Channel) -> Tensor | None:
        found: Tensor | None = super()._receive(channel)
        return found
