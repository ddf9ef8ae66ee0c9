"""Channels, as the device files declare them, and how a device sees their messages travel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HEADER_LENGTH = 33  # of a message's layout: dimensions, then up to 16 sizes and 16 strides
HEADER_BYTES = 8 * HEADER_LENGTH


@dataclass(frozen=True)
class Channel:
    """One ordered stream of messages between two stages.

    `kind` is activation, gradient, tied (a shared parameter's gradient), norm (for clipping), loss,
    reduce and gather (pieces of a bucket of gradients), statistics (of BatchNorm), or part (between
    members of a group). `tag` numbers the channel in the whole bundle. Messages have shape `shape`
    and type `dtype`; `per_step` counts those of a step, where that is not one, or for activations
    and gradients one a micro-batch. One that `varies` carries micro-batches of unequal rows, or
    gradients that may be None: `shape` is that of the largest, and each message says its own. Of
    one `on_demand` no receive is posted before it is wanted: there is no room for it (ZeRO 3).
    """

    tag: int
    kind: str
    value: str
    source: int
    target: int
    sender: str
    receiver: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    per_step: int | None = None
    varies: bool = False
    on_demand: bool = False

    @property
    def wire(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what travels: where messages vary, bytes for the largest of them."""
        nbytes = HEADER_BYTES + math.prod(self.shape) * self.dtype.itemsize
        return ((nbytes,), torch.uint8) if self.varies else (self.shape, self.dtype)

    def messages(self, micro_batches: int) -> int:
        """Return how many a step has, for a device with so many micro-batches."""
        if self.per_step is not None:
            return self.per_step
        return micro_batches if self.kind in ("activation", "gradient") else 1

    @property
    def is_local(self) -> bool:
        """Whether both stages are on one device, so that nothing is sent."""
        return self.sender == self.receiver

    def __str__(self) -> str:
        ends = f"stage {self.source} ({self.sender}) to stage {self.target} ({self.receiver})"
        return f"{self.kind} {self.value!r} from {ends}"


class Transport(Protocol):
    """How messages travel between devices."""

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Expect so many messages on each incoming channel."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Start sending."""

    def recv(self, channel: Channel) -> Tensor:
        """Wait for the next message."""

    def finish(self) -> None:
        """Wait until all sends have left."""
