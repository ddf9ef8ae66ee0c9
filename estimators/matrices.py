"""The matrices of a product: their sides, how they are aligned, and what is copied to make them.

A tensor core reads eight halves at once, and a multiprocessor computes a tile of a product at once.
A batched product reads matrices that lie one after another. It knows aten's names and torch's rules
of strides; it knows no device and no seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from bigbrain_fx.core import TensorSpec

from .calls import PricedCall, number
from .cuda_rules import TILE_SIDE

_WIDEST = 8  # halves that are read at once: 16 bytes


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """rows x inner times inner x columns; `aligned`: 8, 4, 2 or 1 elements that its rows fill."""

    rows: int
    inner: int
    columns: int
    aligned: int

    def covered(self, backward: bool) -> float:
        """Return what tiles compute over what is needed: 49 rows take a tile of 128.

        Backward makes two products, with each pair of the three sides; this is their mean.
        """
        rows, inner, columns = map(_covered, (self.rows, self.inner, self.columns))
        return (rows * inner * columns) ** (2 / 3) if backward else rows * columns


def _covered(side: int) -> float:
    return -(-side // TILE_SIDE) * TILE_SIDE / side if side else 1.0


def matrix_shape(call: PricedCall, family: str) -> MatrixShape:
    """Return the matrices of a product; leading sides of a linear layer's input are all rows."""
    shape = [number(side) for side in call.result.shape] or [1]
    numel = prod(shape)
    columns = shape[-1]
    rows = numel // max(1, columns) if family == "linear" else (shape[-2:-1] or [1])[0]
    inner = round(call.flops / 2 / max(1, numel))
    sides = [number(spec.shape[-1]) for spec in _operands(call) if len(spec.shape) > 1]
    return MatrixShape(rows, inner, columns, min(map(_aligned, (*sides, columns))))


def _operands(call: PricedCall) -> list[TensorSpec]:
    params = (call.scope.param(name) for name in call.op.params)
    return [*(spec for _, spec in call.values), *(spec for spec in params if spec is not None)][:3]


def _aligned(side: int) -> int:
    return next(width for width in (_WIDEST, 4, 2, 1) if side % width == 0)


def copied_numbers(call: PricedCall, family: str) -> int:
    """Count the elements that are copied first, as torch folds a product's leading sides into one.

    A linear layer needs rows that follow each other, a batched product batches that do and a side
    of stride 1. Heads that were split off the width and turned to the front are copied.
    """
    fits = _is_dense if family == "linear" else _is_batch
    specs = [spec for _, spec in call.values if len(spec.shape) > 2]
    return sum(spec.numel for spec in specs if not fits(_sides(spec)))


def _sides(spec: TensorSpec) -> Sequence[tuple[int, int]]:
    """Return (side, stride) of each dimension of more than one element."""
    pairs = zip(map(number, spec.shape), map(number, spec.strides), strict=True)
    return [pair for pair in pairs if pair[0] != 1]


def _is_dense(sides: Sequence[tuple[int, int]]) -> bool:
    return not sides or (sides[-1][1] == 1 and _follow(sides))


def _is_batch(sides: Sequence[tuple[int, int]]) -> bool:
    return 1 in [stride for _, stride in sides[-2:]] and _follow(sides[:-2])


def _follow(sides: Sequence[tuple[int, int]]) -> bool:
    """Whether each dimension steps over all of the next one: they are one dimension."""
    pairs = itertools.pairwise(sides)
    return all(stride == side * inner for (_, stride), (side, inner) in pairs)
