"""One device's stages run forward: messages come in and go out, one method per kind of instruction.

    recv ──▶ forward ──▶ send      activations, to later stages

The emitted file decides what happens when; this file only does it. It knows no schedule and no
training; `device` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .channel import Channel, disclose, enclose, enclose_nothing
from .data import Stream
from .held_weights import HeldWeights
from .hooks import Hooks
from .modules import Stage, active, is_released
from .transport import Transport
from .weights import OwnWeights, fill

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .group import Group


class ForwardDevice:
    """Run one device's part of every step; emitted classes fill in the attributes and `step_once`.

    Attributes:
        name: the device.
        names: all devices, by rank.
        micro_batches: how many a step has, over all replicas.
        micros: of each replica, the numbers of those that it computes; empty: one replica, all.
        replica: which one this device is part of.
        replica_of_stage: of a device that is part of two (gems): which one a stage is part of.
        stages: stage number -> class.
        channels: those that start or end here, in the order of the bundle.
        tied: parameters that several stages hold, on any device -> those stages.
        aliases: other names of tied parameters -> the name that the optimizer sees.
        members: the devices that run its stages together, this one among them, in the order in
            which parts are added; empty: it has all of their tensors.
        compiled: its stages run under torch.compile. See `compiled`.
        stream_type: what gives it its batches.
        is_opaque: it runs the user's own step, and no stage. See `opaque_device`.
    """

    name = ""
    names: tuple[str, ...] = ()
    micro_batches = 1
    micros: tuple[Sequence[int], ...] = ()
    replica = 0
    replica_of_stage: Mapping[int, int] = {}
    stages: Mapping[int, type[Stage]] = {}
    channels: tuple[Channel, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = {}
    aliases: Mapping[str, str] = {}
    members: tuple[str, ...] = ()
    compiled = False
    stream_type: type[Stream] = Stream
    is_opaque = False

    def __init__(
        self, transport: Transport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        self.transport = transport
        self.stream = stream
        self.seed = seed
        self.device = device
        self.hooks = Hooks()
        self.modules = {number: self._made(stage) for number, stage in self.stages.items()}
        if self.compiled:
            self._compile()
        self.held = HeldWeights(self.name, self.aliases, self.tied)
        self.group = self._joined_group()
        self.step = 0
        self.finished = 0  # steps
        self.of_run: dict[str, int] = {}  # what its files of --save say they are of
        self._compared = False  # this step's batch with the others'
        self._kept: dict[int, deque[Tensor | None]] = {}

    def _joined_group(self) -> Group | None:
        if not self.members:
            return None
        from .group import Group  # only bundles with groups have it

        return Group(self.members, self.name, self.channels, self._send, self._receive)

    def _made(self, stage: type[Stage]) -> Stage:
        return stage.empty(self.device).train()

    def _compile(self) -> None:
        from .compiled import compile_stages  # only bundles of --compile have it
        from .compiler import require_compiler

        if self.device.type == "cpu":
            require_compiler(self.name)
        compile_stages(self.modules.values())

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What it holds of the trained parameters, by their names in the model."""
        return self.held.parameters

    # ------------------------------------------------------------------ set-up

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, by their names in the model.

        `owner` lists every trained parameter of the whole model, in its order, and the device that
        answers for its norm.

        Raises:
            WeightsError: a tensor is missing or has another shape, or `owner` is not of them.
        """
        self.held.know(owner, tensors.divided if isinstance(tensors, OwnWeights) else {})
        for number, module in self.modules.items():
            self._fill(number, module, tensors)
        self.held.put_in_order()

    def _fill(self, number: int, module: Stage, tensors: Mapping[str, Tensor]) -> None:
        fill(module, tensors, set())
        self.held.share(number, module)

    def state(self) -> dict[str, Tensor]:
        """Return this device's tensors by their names in the model; parts by those of parts.

        With ZeRO 3 those that it keeps.
        """
        return {
            self.held.divided.get(name, name): t.detach()
            for module in self.modules.values()
            for name, t in module.state_dict().items()
            if not is_released(t)
        }

    # ------------------------------------------------------------------ a step

    def run_step(self, step: int) -> Tensor | None:
        """Run one step; return its loss, the mean over its rows, where one is reported."""
        for at_begin in self.hooks.on_step_begin:
            at_begin(self, step)
        self.step = step
        self._compared = False
        self._begin()
        self.stream.advance(step)
        incoming = [c for c in self.messaging() if c.receiver == self.name]
        self.transport.begin_step(tuple((channel, self._messages(channel)) for channel in incoming))
        self._run()
        self.transport.finish()
        self.finished = step + 1
        for at_end in self.hooks.on_step_end:
            at_end(self, step)
        return self.loss_now()

    def _begin(self) -> None:
        """Forget the step before."""

    def _run(self) -> None:
        self.step_once()

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        return None

    def step_once(self) -> None:
        """Run this device's instructions for one step; emitted."""
        raise TypeError("a device file defines step_once")

    def _messages(self, channel: Channel) -> int:
        return channel.messages(self.own_micro_batches())

    @classmethod
    def messaging(cls) -> tuple[Channel, ...]:
        """Return the channels between processes."""
        return tuple(c for c in cls.channels if not c.is_local)

    @classmethod
    def own_micro_batches(cls) -> int:
        """How many micro-batches of a step this device computes."""
        return len(cls.micros[cls.replica]) if cls.micros else cls.micro_batches

    # ------------------------------------------------------------------ instructions

    # An activation is a tensor; a gradient may be None.

    def recv(self, channel: Channel, micro: int) -> Any:  # noqa: ANN401  # above
        """Wait for an activation or a gradient.

        An activation becomes a leaf of this stage's backward.
        """
        kept = self._kept[channel.tag] if channel.is_local else None
        tensor: Any = kept.popleft() if kept is not None else self._receive(channel)
        is_leaf = channel.kind == "activation"
        return tensor.requires_grad_(channel.requires_grad) if is_leaf else tensor

    def send(self, channel: Channel, micro: int, tensor: Tensor | None) -> None:
        """Start sending a value or a gradient; within this device it is handed over, detached.

        Messages of a channel are in the order in which they are sent: both ends take their
        micro-batches in one order.
        """
        found = None if tensor is None else tensor.detach()
        if channel.is_local:
            self._kept.setdefault(channel.tag, deque()).append(found)
        else:
            self._send_if_any(channel, found)

    def _send_if_any(self, channel: Channel, tensor: Tensor | None) -> None:
        """Send a tensor or, where there may be none, that there is none; else zeros for it."""
        if tensor is not None:
            self._send(channel, tensor)
        elif channel.varies:
            self.transport.send(channel, enclose_nothing(channel, self.device))
        else:
            zeros = torch.zeros(channel.shape, dtype=channel.dtype, device=self.device)
            self._send(channel, zeros)

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        if tensor.dtype != channel.dtype:
            raise TypeError(f"{channel} carries {channel.dtype}, found {tensor.dtype}")
        for at_send in self.hooks.on_send:
            at_send(self, channel, tensor)
        self.transport.send(channel, enclose(channel, tensor) if channel.varies else tensor)

    def _receive(self, channel: Channel) -> Any:  # noqa: ANN401  # above
        arrived = self.transport.recv(channel)
        tensor = disclose(channel, arrived) if channel.varies else arrived
        if tensor is not None:
            for at_recv in self.hooks.on_recv:
                at_recv(self, channel, tensor)
        return tensor

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, from this device's own data stream.

        A device that reads says once a step what the batch is: all must have the same.
        """
        if not self._compared:
            what = f"the batch of step {self.step}"
            self.transport.agree(what, self.stream.digest(), self.name)
            self._compared = True
        return self.stream.get(name, micro)

    # What is returned is known per stage only: one tensor as it is, several as a tuple.

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward."""
        with self._drawing(micro):
            return self.modules[stage](**values)

    @contextmanager
    def _drawing(self, micro: int) -> Iterator[None]:
        """Key all random draws by the micro-batch: a second run draws the same."""
        self._begin_micro(micro)
        active.key, active.device = self._key(micro), self.device
        active.group = self.group
        try:
            yield
        finally:
            active.key = active.group = None

    def _begin_micro(self, micro: int) -> None:
        """Tell the group which micro-batch its members exchange parts of."""
        if self.group is not None:
            self.group.begin(*self.stream.rows_of(micro))

    def _key(self, micro: int) -> tuple[int, int, int]:
        return self.seed, self.step, micro
