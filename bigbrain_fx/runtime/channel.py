"""Channels and layouts: a tensor with any strides becomes one run of bytes and comes back the same.

The strides travel once per channel, ahead of its first message, because kernels may round
differently for a transposed or an expanded tensor: the receiver must compute on exactly what the
sender had. This file knows nothing of how bytes travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .coded import CodedError

HEADER_LENGTH = 33  # number of dimensions, then up to 16 sizes and 16 strides
_HEADER = 8 * HEADER_LENGTH  # bytes
MAX_DIMS = 16
_NOTHING = -1  # dimensions of None


class LayoutError(CodedError, ValueError):
    """Report a tensor that a channel cannot carry as it is laid out."""


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
        if not self.varies:
            return self.shape, self.dtype
        return (_HEADER + math.prod(self.shape) * self.dtype.itemsize,), torch.uint8

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
        return tuple(
            min(size, 1) if step == 0 else size
            for size, step in zip(self.shape, self.strides, strict=True)
        )

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
    def overlaps(self) -> bool:
        """Whether stored elements may share memory, as the windows that `unfold` gives do."""
        reach = 0
        for step, size in sorted(zip(self.strides, self.stored, strict=True)):
            if size != 1 and step <= reach:
                return True
            reach += (size - 1) * step
        return False

    @property
    def numel(self) -> int:
        """Number of elements that travel."""
        count = 1
        for size in self.stored:
            count *= size
        return count

    def header(self) -> Tensor:
        """Return the layout as the int64 message that opens a channel."""
        dims = len(self.shape)
        if dims > MAX_DIMS:
            raise LayoutError(
                f"a tensor of {dims} dimensions cannot be sent; {MAX_DIMS} is the most",
                code="BX5008",
            )
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


def pack(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the elements to send as one dense 1-d tensor, without a copy where the layout allows.

    `layout` is the channel's; a tensor of other strides is first copied into it.

    Raises:
        LayoutError: the channel's layout repeats elements that differ in this tensor.
    """
    tensor = tensor.resolve_conj().resolve_neg()  # numbers travel, no note to turn a sign
    if Layout.of(tensor) != layout:
        _require_room(tensor, layout)
        fresh = torch.empty_strided(
            layout.stored, _dense_strides(layout), dtype=tensor.dtype, device=tensor.device
        )
        return fresh.copy_(_stored(tensor, layout)).as_strided((layout.numel,), (1,))
    if layout.is_dense:
        return tensor.as_strided((layout.numel,), (1,))
    return _stored(tensor, layout).reshape(-1).contiguous()  # 1-d, it may still have gaps


def unpack(flat: Tensor, layout: Layout) -> Tensor:
    """Return the received elements as a tensor with exactly the sender's shape and strides."""
    if layout.is_dense:
        return flat.as_strided(layout.shape, layout.strides)
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(layout.stored, layout.strides, strict=True)
    )
    gappy = torch.empty(extent, dtype=flat.dtype, device=flat.device)
    if layout.overlaps:
        places = torch.arange(extent, device=flat.device)
        gappy[places.as_strided(layout.stored, layout.strides).reshape(-1)] = flat
        return gappy.as_strided(layout.shape, layout.strides)
    gappy.as_strided(layout.stored, layout.strides).copy_(flat.view(layout.stored))
    return gappy.as_strided(layout.shape, layout.strides)


def enclose_nothing(channel: Channel, device: torch.device) -> Tensor:
    """Return a message of a channel that varies, which says that there is no tensor."""
    shape, kind = channel.wire
    made = torch.zeros(shape, dtype=kind, device=device)
    made[:_HEADER].view(torch.int64)[0] = _NOTHING
    return made


def enclose(channel: Channel, tensor: Tensor) -> Tensor:
    """Return a message of a channel that varies: its layout, its elements, and room to spare.

    Raises:
        LayoutError: it has more elements than the channel has room for.
    """
    layout, (shape, kind) = Layout.of(tensor), channel.wire
    flat = pack(tensor, layout).view(torch.uint8)
    if flat.numel() > shape[0] - _HEADER:
        raise LayoutError(
            f"{channel}: {layout.shape} is larger than {channel.shape}", code="BX5009"
        )
    made = torch.zeros(shape, dtype=kind, device=tensor.device)
    made[:_HEADER] = layout.header().view(torch.uint8).to(tensor.device)
    made[_HEADER : _HEADER + flat.numel()] = flat
    return made


def disclose(channel: Channel, message: Tensor) -> Tensor | None:
    """Return the tensor that `enclose` was given, in memory of its own; None if there was none."""
    header = message[:_HEADER].clone().view(torch.int64).cpu()
    if header[0] == _NOTHING:
        return None
    layout = Layout.from_header(header)
    end = _HEADER + layout.numel * channel.dtype.itemsize
    return unpack(message[_HEADER:end].clone().view(channel.dtype), layout)


def _require_room(tensor: Tensor, layout: Layout) -> None:
    """Refuse a tensor whose elements are not repeated where the channel's layout repeats them."""
    repeated = any(
        planned == 0 and size > 1 and step != 0
        for planned, step, size in zip(layout.strides, tensor.stride(), layout.shape, strict=True)
    )
    if repeated or (layout.numel > 0 and not layout.is_dense and layout.overlaps):
        raise LayoutError(
            f"the first message had strides {layout.strides}, which repeat elements; "
            f"this one has {tuple(tensor.stride())}: make the value contiguous in the model",
            code="BX5010",
        )


def _dense_strides(layout: Layout) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in the same order as the layout's."""
    if layout.is_dense:
        return layout.strides
    strides, step = [], 1
    for size in reversed(layout.stored):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _stored(tensor: Tensor, layout: Layout) -> Tensor:
    for dim, step in enumerate(layout.strides):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], 1))
    return tensor
