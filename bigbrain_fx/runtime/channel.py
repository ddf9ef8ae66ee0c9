"""Channels, as the device files declare them, and how their messages are laid out and travel.

A tensor with any strides becomes one run of bytes and comes back the same. The strides travel once
per channel, ahead of its first message, because kernels may round differently for a transposed or
an expanded tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .coded import MisuseError

MAX_DIMS = 16


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Return a tensor's layout."""
        return Layout(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape without what is only repeated (stride 0)."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(size if step else min(size, 1) for size, step in pairs)

    @property
    def is_dense(self) -> bool:
        """Whether the stored elements fill one run of memory, in some order of dimensions."""
        if self.numel == 0:
            return True
        expected = 1
        for step, size in sorted(zip(self.strides, self.stored, strict=True)):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def numel(self) -> int:
        """Number of elements that travel."""
        return math.prod(self.stored)

    def header(self) -> Tensor:
        """Return the layout as the int64 message that opens a channel."""
        dims = len(self.shape)
        if dims > MAX_DIMS:
            said = f"a tensor of {dims} dimensions cannot be sent; {MAX_DIMS} is the most"
            raise MisuseError(said, code="BX5008")
        pad = (0,) * (MAX_DIMS - dims)
        return torch.tensor((dims, *self.shape, *pad, *self.strides, *pad), dtype=torch.int64)

    @staticmethod
    def from_header(header: Tensor) -> Layout:
        """Read the message that opens a channel."""
        numbers = header.tolist()
        dims = numbers[0]
        return Layout(
            tuple(numbers[1 : 1 + dims]), tuple(numbers[1 + MAX_DIMS : 1 + MAX_DIMS + dims])
        )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one run of memory, each of them once."""
    if tensor.is_contiguous():
        return True
    return 0 not in tensor.stride() and Layout.of(tensor).is_dense


def pack(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the elements to send as one dense 1-d tensor, without a copy where possible."""
    if Layout.of(tensor) != layout:
        raise MisuseError(f"expected {layout}, found {Layout.of(tensor)}", code="BX5207")
    if layout.is_dense:
        return tensor.as_strided((layout.numel,), (1,))
    return stored(tensor, layout).reshape(-1).contiguous()  # 1-d, it may still have gaps


def unpack(flat: Tensor, layout: Layout) -> Tensor:
    """Return the received elements as a tensor with exactly the sender's shape and strides."""
    if layout.is_dense:
        return flat.as_strided(layout.shape, layout.strides)
    pairs = zip(layout.stored, layout.strides, strict=True)
    places = torch.arange(1 + sum((size - 1) * step for size, step in pairs), device=flat.device)
    gappy = torch.empty(places.numel(), dtype=flat.dtype, device=flat.device)
    gappy[places.as_strided(layout.stored, layout.strides).reshape(-1)] = flat
    return gappy.as_strided(layout.shape, layout.strides)


def stored(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a tensor without what the layout only repeats."""
    for dim, step in enumerate(layout.strides):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 1))
    return tensor


HEADER_LENGTH = 33  # of a message's layout: dimensions, then up to 16 sizes and 16 strides
HEADER_BYTES = 8 * HEADER_LENGTH


@dataclass(frozen=True)
class Channel:
    """One ordered stream of messages between two stages.

    `kind` is activation, gradient, tied (a shared parameter's gradient), norm (for clipping), loss,
    statistics (of BatchNorm) or part (between ranks of a tensor group). It is reduce or gather for
    pieces of a bucket of gradients. `tag` numbers the channel in the whole bundle. Messages have
    shape `shape` and type `dtype`. `per_step` counts those of a step; None: one, or one a
    micro-batch for activations and gradients. One that `varies` carries micro-batches of unequal
    rows, or gradients that may be None. Its `shape` is the largest, and each message has its own.
    One `on_demand` is received only when it is needed, as memory has no place for it (ZeRO 3).
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
