"""A device that calls features, hooks and the comparison of batches around its steps.

Copied into all bundles but those of `split --bare`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .agreed import AgreeingTransport, BatchDigests
from .channel import Channel
from .data import Stream
from .feature import Feature, Features, HookCalls, Hooks
from .forward_device import ForwardDevice


class HookedDevice(ForwardDevice):
    """Run one device's part of every step; features take part in it.

    Attributes:
        names: all devices, by rank.
        stream_type: what gives it its batches.
    """

    names: tuple[str, ...] = ()
    stream_type: type[Stream] = Stream
    transport: AgreeingTransport
    stream: Stream

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.features = Features()
        self.finished = 0  # steps
        self.hooks = Hooks()
        self.of_run: dict[str, int] = {}  # what its files of --save say they are of
        self.add(HookCalls())
        self.add(BatchDigests())

    def add(self, feature: Feature, *, outermost: bool = False) -> None:
        """Let a feature take part in the steps, after those that were added before."""
        self.features.add(feature, self, outermost=outermost)

    def run_step(self, step: int) -> Tensor | None:
        """Run one step; return its loss, the mean over its rows, where one is reported."""
        loss = super().run_step(step)
        self.finished = step + 1
        for end_step in self.features["end_step"]:
            end_step(step)
        return loss

    def _begin(self, step: int) -> None:
        for begin_step in self.features["begin_step"]:
            begin_step(step)
        super()._begin(step)

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, from this device's own data stream."""
        for on_batch in self.features["on_batch"]:
            on_batch()
        return super().batch(name, micro)

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        for on_send in self.features["on_send"]:
            on_send(channel, tensor)
        self._send_as_is(channel, tensor)

    def _send_as_is(self, channel: Channel, tensor: Tensor) -> None:
        super()._send(channel, tensor)

    def _receive(self, channel: Channel) -> Any:  # noqa: ANN401  # a tensor, or None
        tensor = self._receive_as_is(channel)
        for on_recv in self.features["on_recv"] if tensor is not None else ():
            on_recv(channel, tensor)
        return tensor

    def _receive_as_is(self, channel: Channel) -> Tensor | None:
        found: Tensor | None = super()._receive(channel)
        return found
