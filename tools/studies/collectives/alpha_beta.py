"""Measured messages -> alpha-beta: latency + bytes / bandwidth, fitted in relative error.

For whoever times messages (`doctor`, published tables) or forecasts them. This room knows numbers;
it knows no device and no transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Link
from bigbrain_fx.errors import InputError

Floats = NDArray[np.float64]

FEWEST_POINTS = 4  # of a piece: with fewer, two parameters pass through nearly everything


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The time of a message of n bytes: latency_s + n * s_per_byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of `nbytes` bytes."""
        return self.latency_s + nbytes * self.s_per_byte

    @property
    def link(self) -> Link:
        """As a link of a cluster; without a price per byte, its bandwidth is infinite."""
        return Link(self.latency_s, 1.0 / self.s_per_byte if self.s_per_byte else math.inf)


@dataclass(frozen=True, slots=True)
class Pieces:
    """One `AlphaBeta` for each range of sizes: a protocol that switches with the message's size.

    `ends_bytes[i]` is where piece i ends; the last piece has no end.
    """

    pieces: tuple[AlphaBeta, ...]
    ends_bytes: tuple[float, ...]

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of `nbytes` bytes."""
        return self.pieces[sum(nbytes >= end for end in self.ends_bytes)].seconds(nbytes)


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit the latency and the price per byte, neither below zero, of least mean relative error.

    Least *absolute* deviations, so that a few disturbed measurements do not bend it, and each
    divided by what was measured, so that a message of 1 KiB counts as much as one of 1 GiB. The
    minimum is exact: it is at a corner, which is a line through two points, or through one point
    with no latency or no price per byte; all corners are tried (cubic in the number of points).

    Args:
        sizes: bytes of each message; a size may stand there several times.
        seconds: what each took.

    Raises:
        InputError: fewer than two sizes, or a time that is not a positive number.

    Source: least absolute deviations as a linear program (Charnes, Cooper and Ferguson, 1955); the
    model is Hockney's (1994).
    """
    n_bytes, taken_s = _checked(sizes, seconds)
    return _fit(n_bytes, taken_s)[0]


def fit_pieces(sizes: Sequence[float], seconds: Sequence[float], most: int = 2) -> Pieces:
    """Fit up to `most` pieces, each as `fit_alpha_beta` does; the best places to switch are found.

    A further piece must have `FEWEST_POINTS` points. The pieces need not meet: where a protocol
    switches, time jumps.

    Raises:
        InputError: as `fit_alpha_beta`.
    """
    n_bytes, taken_s = _checked(sizes, seconds)
    order = np.argsort(n_bytes, kind="stable")
    n_bytes, taken_s = n_bytes[order], taken_s[order]
    most = max(1, min(most, len(n_bytes) // FEWEST_POINTS))
    bounds = _best_bounds(n_bytes, taken_s, most)
    fits = tuple(_fit(n_bytes[a:b], taken_s[a:b])[0] for a, b in bounds)
    ends = tuple(_between(n_bytes[b - 1], n_bytes[b]) for _, b in bounds[:-1])
    return Pieces(fits, ends)


def relative_errors(
    model: AlphaBeta | Pieces, sizes: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Return |forecast / measured - 1| of every message."""
    pairs = zip(sizes, seconds, strict=True)
    return [abs(model.seconds(nbytes) / taken_s - 1.0) for nbytes, taken_s in pairs]


def _checked(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[Floats, Floats]:
    n_bytes, taken_s = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    if n_bytes.shape != taken_s.shape or len(np.unique(n_bytes)) < 2:
        raise InputError(
            f"expected the times of at least two sizes, found {len(taken_s)} times of "
            f"{len(np.unique(n_bytes))} sizes",
            help="measure a small and a large message",
        )
    good = np.isfinite(n_bytes) & np.isfinite(taken_s) & (n_bytes >= 0) & (taken_s > 0)
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"expected a size and a positive time, found {n_bytes[at]} bytes in {taken_s[at]} s",
            help="leave out what was not measured",
        )
    return n_bytes, taken_s


def _fit(n_bytes: Floats, taken_s: Floats) -> tuple[AlphaBeta, float]:
    """Return the best corner and the sum of its relative errors."""
    corners = _corners(n_bytes, taken_s)
    forecasts = corners[:, :1] + corners[:, 1:] * n_bytes
    errors: Floats = np.abs(forecasts / taken_s - 1.0).sum(axis=1)
    best = int(np.argmin(errors))
    return AlphaBeta(float(corners[best, 0]), float(corners[best, 1])), float(errors[best])


def _corners(n_bytes: Floats, taken_s: Floats) -> Floats:
    """Return [latency_s, s_per_byte] of every candidate, shape (candidates, 2)."""
    i, j = np.triu_indices(len(n_bytes), 1)
    apart = n_bytes[i] != n_bytes[j]
    i, j = i[apart], j[apart]
    slope = (taken_s[j] - taken_s[i]) / (n_bytes[j] - n_bytes[i])
    through_two = np.column_stack([taken_s[i] - slope * n_bytes[i], slope])
    flat = np.column_stack([taken_s, np.zeros_like(taken_s)])
    sized = n_bytes > 0
    steep = np.column_stack([np.zeros(int(sized.sum())), taken_s[sized] / n_bytes[sized]])
    found: Floats = np.concatenate([through_two[(through_two >= 0).all(axis=1)], flat, steep])
    return found


def _best_bounds(n_bytes: Floats, taken_s: Floats, most: int) -> list[tuple[int, int]]:
    """Return (first, end) of the pieces of least error, by dynamic programming over their ends."""
    count = len(n_bytes)
    shortest = min(FEWEST_POINTS, count)
    cost = {
        (a, b): _fit(n_bytes[a:b], taken_s[a:b])[1]
        for b in range(shortest, count + 1)
        for a in range(0, b - shortest + 1)
        if (a == 0 or n_bytes[a - 1] < n_bytes[a]) and (a == 0 or most > 1)
    }
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {
        b: (cost[0, b], [(0, b)]) for b in range(shortest, count + 1)
    }
    for _ in range(most - 1):
        longer = dict(best)
        for (a, b), own in cost.items():
            if a in best and best[a][0] + own < longer[b][0]:
                longer[b] = (best[a][0] + own, [*best[a][1], (a, b)])
        best = longer
    return best[count][1]


def _between(smaller: float, larger: float) -> float:
    """Return the size halfway between two, in orders of magnitude."""
    return math.sqrt((smaller + 1.0) * (larger + 1.0)) - 1.0
