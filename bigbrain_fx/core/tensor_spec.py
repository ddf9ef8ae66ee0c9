"""A tensor as data: its sizes, some of which go with the batch, and what an element is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bigbrain_fx.core.sizes import DTYPE_BYTES, Dim, size_of


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

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dim) for dim in self.shape)}]"
