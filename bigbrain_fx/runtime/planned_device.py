"""A device of any plan: hooks, comparison of batches, tensor groups, messages that vary.

Copied into all bundles but those of `split --bare`, which have the plain `PipelineDevice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .agreed import AgreeingTransport, BatchDigests
from .channel import Channel
from .data import Stream
from .feature import Feature, Features, HookCalls, Hooks
from .forward_device import ForwardDevice
from .weights import OwnWeights

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .group import Group


class PlannedDevice(ForwardDevice):
    """Run one device's part of every step, with what any plan may ask for.

    Attributes:
        names: all devices, by rank.
        micros: of each replica, the numbers of the micro-batches that it computes; empty: one
            replica, all.
        replica: which one this device is part of.
        replica_of_stage: of a device that is part of two replicas (gems): which one a stage is
            part of.
        members: the devices that run its stages together, this one among them, in the order in
            which parts are added; empty: it has all of their tensors.
        compiled: its stages run under torch.compile. See `compiled`.
        stream_type: what gives it its batches.
        is_opaque: it runs the user's own step, and no stage. See `opaque_device`.
    """

    names: tuple[str, ...] = ()
    micros: tuple[Sequence[int], ...] = ()
    replica = 0
    replica_of_stage: Mapping[int, int] = {}
    members: tuple[str, ...] = ()
    compiled = False
    stream_type: type[Stream] = Stream
    is_opaque = False
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
        self.group: Group | None = None
        self.add(HookCalls())
        self.add(BatchDigests())
        if self.compiled:
            from .compiled import CompiledStages  # only bundles of --compile have it

            self.add(CompiledStages())
        if self.members:
            from .group_runs import GroupRuns  # only bundles with groups have it

            self.add(GroupRuns())

    def add(self, feature: Feature, *, outermost: bool = False) -> None:
        """Let a feature take part in the steps, after those that were added before."""
        self.features.add(feature, self, outermost=outermost)

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights; see `ForwardDevice.load`. Some may be parts of tensors."""
        self.held.divided = dict(tensors.divided) if isinstance(tensors, OwnWeights) else {}
        for alias, name in self.aliases.items():
            if alias in self.held.divided:
                self.held.divided[name] = name + self.held.divided[alias].removeprefix(alias)
        super().load(tensors, owner)

    def state(self) -> dict[str, Tensor]:
        """Return this device's tensors by their names in the model; parts by those of parts."""
        return {self.held.divided.get(n, n): tensor for n, tensor in super().state().items()}

    # ------------------------------------------------------------------ a step

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

    def _messages(self, channel: Channel) -> int:
        return channel.messages(self.own_micro_batches())

    @classmethod
    def own_micro_batches(cls) -> int:
        """How many micro-batches of a step this device computes."""
        return len(cls.micros[cls.replica]) if cls.micros else cls.micro_batches

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, from this device's own data stream."""
        for on_batch in self.features["on_batch"]:
            on_batch()
        return super().batch(name, micro)

    def _running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[Any]:
        """Return the context in which a stage runs: forward, backward or (recomputed) again."""
        with ExitStack() as stack:
            for running in self.features["running"]:
                stack.enter_context(running(stage, micro, phase))
            return stack.pop_all()

    # ------------------------------------------------------------------ messages

    def _send_if_any(self, channel: Channel, tensor: Tensor | None) -> None:
        """Send a tensor or, where there may be none, that there is none; else zeros for it."""
        if tensor is not None or not channel.varies:
            super()._send_if_any(channel, tensor)
            return
        from .varying import enclose_nothing  # only bundles whose messages vary have it

        self.transport.send(channel, enclose_nothing(channel, self.device))

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        for on_send in self.features["on_send"]:
            on_send(channel, tensor)
        if channel.varies and tensor.dtype == channel.dtype:
            from .varying import enclose

            self.transport.send(channel, enclose(channel, tensor))
        else:
            super()._send(channel, tensor)

    def _receive(self, channel: Channel) -> Any:  # noqa: ANN401  # a tensor, or None
        tensor = super()._receive(channel)
        if channel.varies:
            from .varying import disclose

            tensor = disclose(channel, tensor)
        for on_recv in self.features["on_recv"] if tensor is not None else ():
            on_recv(channel, tensor)
        return tensor
