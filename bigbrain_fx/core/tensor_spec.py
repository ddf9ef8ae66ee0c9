"""A tensor as data: its sizes, some of which go with the batch, and what an element is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigbrain_fx.core.sizes import DTYPE_BYTES, Dim, dense_strides, size_of

_FORMATS = {4: "channels_last", 5: "channels_last_3d"}  # torch's names, by dimensions


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe one tensor.

    Attributes:
        strides: in elements, like torch's.
        requires_grad: whether a gradient is wanted.
    """

    shape: tuple[Dim, ...]
    dtype: str
    strides: tuple[Dim, ...]
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; the spec must be concrete (`at`)."""
        return math.prod(int(dim) for dim in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense copy; the spec must be concrete (`at`)."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def at(self, batch: int) -> TensorSpec:
        """Return this spec with every size a number, for a batch of `batch` rows."""
        shape = tuple(size_of(dim, batch) for dim in self.shape)
        strides = tuple(size_of(dim, batch) for dim in self.strides)
        return replace(self, shape=shape, strides=strides)

    @property
    def is_channels_last(self) -> bool:
        """Whether an image's channels lie side by side, as in a memory format of torch's."""
        if len(self.shape) not in _FORMATS:
            return False
        _, channels, *sizes = (int(dim) for dim in self.shape)
        inner = [channels * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        return self.strides == (channels * math.prod(sizes), 1, *inner)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dim) for dim in self.shape)}]"


def memory_format(specs: Iterable[TensorSpec]) -> str | None:
    """Return the format in which `Module.to(memory_format=…)` lays these tensors, where one does.

    torch changes the tensors of 4 dimensions alone, or those of 5. None: one has another format, or
    all lie row by row.
    """
    images = [spec for spec in specs if len(spec.shape) in _FORMATS]
    found = {_FORMATS[len(spec.shape)] for spec in images}
    one = len(found) == 1 and all(spec.is_channels_last for spec in images)
    turned = any(spec.strides != dense_strides(spec.shape) for spec in images)
    return found.pop() if one and turned else None
