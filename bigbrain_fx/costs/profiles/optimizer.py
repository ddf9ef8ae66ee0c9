"""Timed optimizer steps -> seconds for each tensor and for each byte.

This file knows numbers only: not how a step is timed, and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    much as one of few large ones.
    """
    from scipy.optimize import nnls

    rows = [(s.tensors / s.seconds, s.nbytes / s.seconds) for s in steps if s.seconds > 0]
    if not rows:
        return 0.0, 0.0
    a, b = np.array(rows).T
    widths = np.array([np.linalg.norm(a), np.linalg.norm(b)])  # bytes are millions, tensors few
    widths[widths == 0.0] = 1.0
    found, _ = nnls(np.array(rows) / widths, np.ones(len(rows)))
    per_tensor_s, per_byte_s = found / widths
    return float(per_tensor_s), float(per_byte_s)
