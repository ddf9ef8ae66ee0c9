"""Sizes of parts: what becomes of shapes, strides and counts when an axis is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import (
    Axis,
    Dim,
    Op,
    Place,
    Ref,
    TensorSpec,
    dense_strides,
    memory_order,
    size_of,
)


@dataclass(frozen=True, slots=True)
class SizePart:
    """What one member has of an axis."""

    axis: Axis
    lengths: tuple[int, ...]
    member: int

    @property
    def start(self) -> int:
        """First index of the axis that the member has."""
        return sum(self.lengths[: self.member])

    @property
    def length(self) -> int:
        """How many of them it has."""
        return self.lengths[self.member]

    def gathers(self, op: Op, arg: object) -> bool:
        """Whether an op makes its part of the whole of a value that has the axis, too."""
        return isinstance(arg, Ref) and (op.name, arg.value) in self.axis.gathered

    def of(self, count: Dim) -> Dim:
        """Return the member's part of a count."""
        if isinstance(count, int):
            return count * self.length // self.axis.size
        return f"({count})*{self.length}//{self.axis.size}"

    def narrow(self, spec: TensorSpec, place: Place, batch: int) -> TensorSpec:
        """Return how the member's part of a tensor is."""
        there = spec.strides[place.dim] if spec.strides else 0
        shape = tuple(self.of(n) if i == place.dim else n for i, n in enumerate(spec.shape))
        strides = tuple(
            self.of(stride) if size_of(stride, batch) > size_of(there, batch) else stride
            for stride in spec.strides
        )
        return replace(spec, shape=shape, strides=strides)

    def work(self, op: Op, outputs: tuple[TensorSpec, ...]) -> Op:
        """Return an op with the member's part of its work, but for what it saves."""
        return replace(
            op,
            outputs=outputs,
            flops=self.of(op.flops),
            reads_bytes=self.of(op.reads_bytes),
            writes_bytes=self.of(op.writes_bytes),
            saves=None,
        )


def dense(shape: Sequence[Dim], dtype: str, *, grad: bool) -> TensorSpec:
    """Return a dense tensor's spec."""
    return TensorSpec(tuple(shape), dtype, dense_strides(shape), grad)


def lies(spec: TensorSpec, batch: int) -> tuple[int, ...]:
    """Return a tensor's dimensions as they lie in memory, the slowest first."""
    exact = spec.at(batch)
    strides = exact.strides or dense_strides(exact.shape)
    return memory_order([int(n) for n in exact.shape], [int(n) for n in strides])


def is_row_by_row(spec: TensorSpec, batch: int) -> bool:
    """Whether a tensor's last dimension is the fastest in memory, and so on."""
    return lies(spec, batch) == tuple(range(len(spec.shape)))
