"""Timed optimizer steps -> seconds for each tensor and for each byte.

This file knows numbers only: not how a step is timed, and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

_Row: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimedOptimizer:
    """One timed set: a step over `tensors` trained tensors of `nbytes` bytes together.

    `what` says which set it is, for people; `seconds` are of one step, gradients given and taken.
    """

    what: str
    tensors: int
    nbytes: int
    seconds: float

    def off(self, per_tensor_s: float, per_byte_s: float) -> float:
        """Return how far a fit is off, as a share of what was measured."""
        return abs((self.tensors * per_tensor_s + self.nbytes * per_byte_s) / self.seconds - 1.0)


def fit_optimizer(steps: Sequence[TimedOptimizer]) -> tuple[float, float]:
    """Fit seconds = tensors x a + bytes x b; return a and b, neither below zero.

    Non-negative least squares of relative errors, so that a set of many small tensors counts as
    much as one of few large ones. Of two unknowns that is: the plain solution, or where that has a
    negative part the better of the two with one unknown (Lawson and Hanson, 1974).
    """
    rows = [(s.tensors / s.seconds, s.nbytes / s.seconds) for s in steps if s.seconds > 0]
    found = _plain(rows)
    if min(found) >= 0.0:
        return found
    alone = ((_single([a for a, _ in rows]), 0.0), (0.0, _single([b for _, b in rows])))
    return min(alone, key=lambda pair: _squares(rows, pair))


def _plain(rows: Sequence[_Row]) -> tuple[float, float]:
    """Solve the normal equations; (-1, -1) where the sets do not tell the unknowns apart."""
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(r[i] for r in rows) for i in (0, 1))
    scale = aa * bb
    determinant = scale - ab * ab
    if determinant <= 1e-9 * scale:
        return -1.0, -1.0
    return (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant


def _single(column: Sequence[float]) -> float:
    squares = sum(x * x for x in column)
    return sum(column) / squares if squares else 0.0


def _squares(rows: Sequence[_Row], pair: tuple[float, float]) -> float:
    return sum((a * pair[0] + b * pair[1] - 1.0) ** 2 for a, b in rows)
