"""Do two runs compute the same: bit for bit, to rounding, or not? Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["bitwise", "rounding", "different"]
Numbers: TypeAlias = NDArray[np.generic]

ROUNDING = 1e-3
"""Largest relative difference of float32 losses that is taken for rounding.

Losses of training drift apart: Adam turns the sign of a tiny gradient into a whole step of its
learning rate. A wrong gradient or a lost message shows in the first digits.
"""

HALF_ROUNDING = 5e-2
"""The same where tensors of 16 bits are in the model."""


@dataclass(frozen=True)
class Agreement:
    """Difference of two contenders' losses (or outputs).

    Attributes:
        between: their names.
        relative: the largest difference, as a share of the larger number; 0 if bitwise equal.
        alike: whether both split the batch into equal micro-batches. If not, dropout and batch
            statistics may rightly differ: both are of a micro-batch.
    """

    between: tuple[str, str]
    kind: Kind
    relative: float
    alike: bool

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: equal, at least to rounding, where that may be asked for."""
        return self.kind != "different" or not self.alike

    def __str__(self) -> str:
        pair = f"{self.between[0]} and {self.between[1]}"
        if self.kind == "bitwise":
            return f"{pair}: bitwise equal"
        if self.kind == "rounding":
            return f"{pair}: equal to rounding, at most {self.relative:.1e} apart"
        why = "" if self.alike else ", as micro-batches of other sizes may be"
        return f"{pair}: different by {self.relative:.1e}{why}"


def agreement(
    between: tuple[str, str],
    ours: Sequence[Numbers],
    theirs: Sequence[Numbers],
    rounding: float,
    alike: bool,
) -> Agreement:
    """Compare what two runs computed, array by array.

    Args:
        between: the names of the two.
        ours: arrays of one: its losses, or its outputs, in the order they were made.
        theirs: those of the other.
        rounding: the largest relative difference that is taken for rounding.
        alike: whether both have equal micro-batches.
    """
    if len(ours) != len(theirs):
        return Agreement(between, "different", float("inf"), alike)
    if all(map(_bitwise, ours, theirs)):
        return Agreement(between, "bitwise", 0.0, alike)
    relative = max(map(_relative, ours, theirs))
    kind: Kind = "rounding" if relative <= rounding else "different"
    return Agreement(between, kind, relative, alike)


def _bitwise(a: Numbers, b: Numbers) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _relative(a: Numbers, b: Numbers) -> float:
    """Return the largest difference over the largest number; infinity where they do not compare."""
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if not np.array_equal(np.isfinite(wide_a), np.isfinite(wide_b)):
        return float("inf")
    wide_a, wide_b = np.nan_to_num(wide_a), np.nan_to_num(wide_b)
    largest = max(float(np.abs(wide_a).max()), float(np.abs(wide_b).max()))
    apart = float(np.abs(wide_a - wide_b).max())
    return apart / largest if largest else 0.0
