"""A device of any plan: tensor groups, torch.compile, parts of tensors, messages that vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .channel import Channel
from .compared_stream import AgreeingTransport
from .data import Stream
from .feature import Feature, Features
from .hooked_device import HookedDevice
from .weights import OwnWeights

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .group import Group


class PlannedDevice(HookedDevice):
    """Run one device's part of every step, with what any plan may ask for.

    Attributes:
        micros: of each replica, the numbers of the micro-batches that it computes; empty: one
            replica, all.
        replica: which one this device is part of.
        replica_of_stage: of a device that is part of two replicas (gems): which one a stage is
            part of.
        members: the devices that run its stages together, with this one, in the order in which
            parts are added. Empty: it has all of their tensors.
        compiled: its stages run under torch.compile. See `compiled`.
        is_opaque: it runs the user's own step, and no stage. See `opaque_device`.
    """

    micros: tuple[Sequence[int], ...] = ()
    replica = 0
    replica_of_stage: Mapping[int, int] = {}
    members: tuple[str, ...] = ()
    compiled = False
    is_opaque = False

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        self.features = Features()
        super().__init__(transport, stream, seed, device)
        self.group: Group | None = None
        if self.compiled:
            from .compiled import CompiledStages  # only bundles of --compile have it

            self.add(CompiledStages())
        if self.members:
            from .group_runs import GroupRuns  # only bundles with groups have it

            self.add(GroupRuns())

    def add(self, feature: Feature, *, outermost: bool = False) -> None:
        """Let a feature take part in the steps, after those that were added before."""
        self.features.add(feature, self, outermost=outermost)

    def _begin(self, step: int) -> None:
        super()._begin(step)
        for begin_step in self.features["begin_step"]:
            begin_step(step)

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

    def _messages(self, channel: Channel) -> int:
        return channel.messages(self.own_micro_batches())

    @classmethod
    def own_micro_batches(cls) -> int:
        """How many micro-batches of a step this device computes."""
        return len(cls.micros[cls.replica]) if cls.micros else cls.micro_batches

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

    def _send_as_is(self, channel: Channel, tensor: Tensor) -> None:
        if channel.varies and tensor.dtype == channel.dtype:
            from .varying import enclose

            self.transport.send(channel, enclose(channel, tensor))
        else:
            super()._send_as_is(channel, tensor)

    def _receive_as_is(self, channel: Channel) -> Tensor | None:
        tensor = super()._receive_as_is(channel)
        if tensor is None or not channel.varies:
            return tensor
        from .varying import disclose

        return disclose(channel, tensor)
