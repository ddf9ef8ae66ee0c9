"""One device's stages run forward: messages come in and go out, one method per kind of instruction.

    recv ──▶ forward ──▶ send      activations, to later stages

The emitted file decides what happens when; this file only does it. `pipeline_device` trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .channel import Channel, Transport
from .modules import HeldWeights, Stage, active, fill
from .stream import BatchStream


class ForwardDevice:
    """Run one device's part of every step; emitted classes fill in the attributes and `step_once`.

    `micro_batches` are those of a step over all replicas.
    """

    name = ""
    micro_batches = 1
    stages: Mapping[int, type[Stage]] = {}
    channels: tuple[Channel, ...] = ()  # those that start or end here, in the order of the bundle
    tied: Mapping[str, tuple[int, ...]] = {}  # parameter -> the stages, on any device, that hold it
    aliases: Mapping[str, str] = {}  # other names of tied parameters -> what the optimizer sees

    def __init__(
        self, transport: Transport, stream: BatchStream, seed: int, device: torch.device
    ) -> None:
        self.transport, self.stream = transport, stream
        self.seed, self.device = seed, device
        self.modules = {number: self._empty(stage) for number, stage in self.stages.items()}
        self.held = HeldWeights(self.name, self.aliases, self.tied)
        self.step = 0
        self._local: dict[int, deque[Tensor | None]] = {}  # messages within this device

    def _empty(self, stage: type[Stage]) -> Stage:
        return stage.empty(self.device).train()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the device's trained parameters, by their names in the model."""
        return self.held.parameters

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, by their names in the model.

        `owner` lists every trained parameter of the whole model, in its order, and the device that
        answers for its norm.
        """
        self.held.owner = owner
        for number, module in self.modules.items():
            self._fill(number, module, tensors)
        self.held.put_in_order()

    def _fill(self, number: int, module: Stage, tensors: Mapping[str, Tensor]) -> None:
        fill(module, tensors)
        self.held.share(number, module)

    def state(self) -> dict[str, Tensor]:
        """Return this device's tensors by their names in the model."""
        return {n: t.detach() for m in self.modules.values() for n, t in m.state_dict().items()}

    def run_step(self, step: int) -> Tensor | None:
        """Run one step; return its loss, the mean over its rows, where one is reported."""
        self._begin(step)
        self.stream.advance(step)
        incoming = [c for c in self.messaging() if c.receiver == self.name]
        self.transport.begin_step(tuple((channel, self._messages(channel)) for channel in incoming))
        self._run()
        self.transport.finish()
        return self.loss_now()

    def _begin(self, step: int) -> None:
        self.step = step

    def _run(self) -> None:
        self.step_once()

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        return None

    def step_once(self) -> None:
        """Run this device's instructions for one step; emitted."""
        raise TypeError("a device file defines step_once")

    def _messages(self, channel: Channel) -> int:
        return channel.messages(self.micro_batches)

    @classmethod
    def messaging(cls) -> tuple[Channel, ...]:
        """Return the channels between processes."""
        return tuple(c for c in cls.channels if not c.is_local)

    def recv(self, channel: Channel, micro: int) -> Any:  # noqa: ANN401  # by the channel's kind
        """Wait for an activation, which becomes a leaf of the backward, or a gradient or None."""
        is_leaf, here = channel.kind == "activation", channel.is_local
        tensor: Any = self._local[channel.tag].popleft() if here else self._receive(channel)
        return tensor.requires_grad_(channel.requires_grad) if is_leaf else tensor

    def send(self, channel: Channel, micro: int, tensor: Tensor | None) -> None:
        """Start sending a value or a gradient; within this device it is handed over, detached."""
        found = None if tensor is None else tensor.detach()
        if channel.is_local:
            self._local.setdefault(channel.tag, deque()).append(found)
        else:
            self._send_if_any(channel, found)

    def _send_if_any(self, channel: Channel, tensor: Tensor | None) -> None:
        """Send a tensor or, where there is none, zeros for it."""
        zeros = torch.zeros(channel.shape, dtype=channel.dtype) if tensor is None else tensor
        self._send(channel, zeros.to(self.device))

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        if tensor.dtype != channel.dtype:
            raise TypeError(f"{channel} carries {channel.dtype}, found {tensor.dtype}")
        self.transport.send(channel, tensor)

    def _receive(self, channel: Channel) -> Any:  # noqa: ANN401  # as recv's
        return self.transport.recv(channel)

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, from this device's own data stream."""
        return self.stream.get(name, micro)

    @contextmanager
    def _drawing(self, micro: int) -> Iterator[None]:
        """Key all random draws by the micro-batch: a second run draws the same."""
        active.key, active.device = self._key(micro), self.device
        try:
            yield
        finally:
            active.key = None

    def _key(self, micro: int) -> tuple[int, int, int]:
        return self.seed, self.step, micro
