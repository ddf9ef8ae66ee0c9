"""Weights that other replicas keep, gathered for each run of a stage, then let go of: ZeRO 3.

    own weights      ──▶ sent as often as a stage of another replica runs
    others' weights  ──▶ there while a stage runs forward or backward; else they take no memory

A tensor is emptied and filled in place, so that what autograd has kept of it from the forward is
there again for the backward. This file knows buckets; it knows no schedule, but for what
buckets.json says of when to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .buckets import Bucket, Listed
from .channel import Channel
from .feature import Compute, Feature
from .modules import AGAIN, WeightsError, fill
from .released import refill, release
from .replicas import Replicas


class Unsharded:
    """The weights of a device, most of which are there only while a stage of them runs.

    Args:
        replicas: whose buckets say who keeps what.
        listed: buckets.json. "sends" of a bucket says before which of a step's runs of stages, from
            1, its own weights are sent on each channel. 0: when the step begins. "takes" says after
            which run how many of the others' gradients are taken, by the stage that they are for.
    """

    def __init__(self, replicas: Replicas, listed: Listed) -> None:
        self.replicas = replicas
        self._begun = 0
        self._bucket = {bucket.name: bucket for bucket in replicas.buckets}
        self._due: dict[int, dict[str, list[Channel]]] = {}
        for bucket in replicas.buckets:
            for channel in bucket.sums.values():
                for run in _runs(listed, bucket, channel):
                    self._due.setdefault(run, {}).setdefault(bucket.name, []).append(channel)

        self._takes: dict[int, dict[str, int]] = {}
        for bucket in replicas.buckets:
            for run, count in (
                listed[bucket.name].get("takes", {}).get(str(bucket.stage), {}).items()
            ):
                self._takes.setdefault(int(run), {})[bucket.name] = int(count)

    def fill(
        self, module: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
    ) -> None:
        """Take a module's weights that are kept here.

        Raises:
            WeightsError: one is missing, or has another shape.
        """
        own = {name for b in self.replicas.buckets for name in self.replicas.names_in(b, b.place)}
        named = list(module.named_parameters(remove_duplicate=False))
        mine = {name: p for name, p in named if aliases.get(name, name) in own}
        for parameter in mine.values():
            refill(parameter)
        fill(module, tensors, {name for name in module.state_dict() if name not in mine})

    def begin(self) -> None:
        """Begin a step: send what others need before this device runs anything."""
        self._begun = 0
        self._send_due()

    @contextmanager
    def whole(self, stage: int) -> Iterator[None]:
        """Send others what they need by now; have all weights of a stage inside the block."""
        self._begun += 1
        self._send_due()
        buckets = [bucket for bucket in self.replicas.buckets if bucket.stage == stage]
        try:
            for bucket in buckets:
                self._take(bucket)
            yield
        finally:
            for bucket in buckets:
                release(self._others(bucket))

    def take_parts(self) -> None:
        """Take what others have sent of gradients meanwhile: they have its memory until then."""
        for name, count in self._takes.get(self._begun, {}).items():
            self.replicas.take(name, count)

    def apart(self, result: Any) -> Any:  # noqa: ANN401  # as a stage's forward gives it
        """Copy what a stage gives that lies in its weights: they go, and it is still sent."""
        if isinstance(result, tuple | list):
            return type(result)(self.apart(each) for each in result)
        held = {p.untyped_storage()._cdata for p in self.replicas.parameters.values()}
        return result.clone() if result.untyped_storage()._cdata in held else result

    def _send_due(self) -> None:
        """Send what others will need before they can go on; they count on it here."""
        for name, channels in self._due.get(self._begun, {}).items():
            bucket = self._bucket[name]
            own = self.replicas.names_in(bucket, bucket.place)
            piece = torch.cat([self.replicas.parameters[n].detach().reshape(-1) for n in own])
            for channel in channels:
                self.replicas.transport.send(channel, piece)

    def _take(self, bucket: Bucket) -> None:
        for place, channel in bucket.sums_in.items():
            piece = self.replicas.transport.recv(channel)
            for name, (start, end) in self.replicas.names_in(bucket, place).items():
                parameter = self.replicas.parameters[name]
                refill(parameter)
                parameter.data.copy_(piece[start:end].view(parameter.shape))
            del piece  # before the next one comes

    def _others(self, bucket: Bucket) -> Iterator[nn.Parameter]:
        for place in bucket.sums_in:
            for name in self.replicas.names_in(bucket, place):
                yield self.replicas.parameters[name]


class GatheredWeights(Feature):
    """Have the weights of a stage while it runs."""

    def begin_run(self) -> None:
        """Send what others need first."""
        self.device.unsharded.begin()

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Have a stage's weights meanwhile; one that runs again is within its backward."""
        if phase == "again":
            return nullcontext()
        found: AbstractContextManager[None] = self.device.unsharded.whole(stage)
        return found

    def compute(self, run: Compute, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Keep what a stage gives when its weights go."""
        return self.device.unsharded.apart(run(stage, micro, values))


def _runs(listed: Listed, bucket: Bucket, channel: Channel) -> list[int]:
    """Return before which runs of stages a channel's messages leave.

    Raises:
        WeightsError: buckets.json does not say it for each of them.
    """
    found = listed[bucket.name].get("sends", {}).get(str(channel.tag), [])
    if len(found) != channel.messages(0):
        raise WeightsError(
            f"buckets.json: {bucket.name} lacks sends of {channel}: {AGAIN}", code="BX5173"
        )
    return [int(run) for run in found]
