"""Layouts: a tensor with any strides becomes one run of bytes and comes back the same.

The strides travel once per channel, ahead of its first message, because kernels may round
differently for a transposed or an expanded tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .coded import CodedError

MAX_DIMS = 16


class LayoutError(CodedError, ValueError):
    """Report a tensor that a channel cannot carry as it is laid out."""


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
            raise LayoutError(said, code="BX5008")
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
        raise LayoutError(f"expected {layout}, found {Layout.of(tensor)}", code="BX5207")
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
