"""The best contiguous split as a smooth function: dynamic programming with a temperature.

The hard objective of a split is  sum of stages and hops + (M - 1) x the busiest of them.  With a
limit t it is at most

    (M - 1) t + sum over stages and hops of  cost + (M - 1) max(0, busy - t)

and equal to it where t is the busiest, so that the least over splits and over t is the same. Here
the minimum over splits is a sum of exponentials and max(0, x) a softplus, both at one temperature:
the value has a gradient everywhere, and the hard optimum for its limit. It knows arrays only.

Source: Mensch and Blondel, Differentiable Dynamic Programming, ICML'18 (minimum by -T log sum exp,
the gradient is the marginals); the split into a limit and what is over it is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pipeline:
    """Units in one order, for stages on one sequence of devices.

    Attributes:
        unit_s: [stage, unit]: what a unit takes there.
        fits: [stage, first, after]: whether the units first .. after - 1 can be that stage.
        round_trip_s: [hop, cut]: there and back, when hop h (after stage h) is at that cut.
        wire_s: [hop, cut]: of the busier direction.
        micro_batches: M, per step.
    """

    unit_s: Array
    fits: NDArray[np.bool_]
    round_trip_s: Array
    wire_s: Array
    micro_batches: int

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.unit_s)

    @property
    def units(self) -> int:
        """How many units there are."""
        return int(self.unit_s.shape[1])

    @property
    def splits(self) -> int:
        """How many splits there are, those that do not fit included."""
        return comb(self.units - 1, self.stages - 1)

    def load_s(self) -> Array:
        """Return [stage, first, after]: what a piece takes; infinite where it does not fit."""
        until = np.concatenate((np.zeros((self.stages, 1)), self.unit_s.cumsum(axis=1)), axis=1)
        found: Array = until[:, None, :] - until[:, :-1, None]
        found[~self.fits] = np.inf
        return found

    def step_s(self, cuts: Sequence[int]) -> float:
        """Return the hard objective of a split: stage s has units cuts[s] .. cuts[s + 1] - 1."""
        stages = range(self.stages)
        loads = [float(self.unit_s[s, cuts[s] : cuts[s + 1]].sum()) for s in stages]
        hops = [(h, cuts[h + 1]) for h in stages[:-1]]
        wires = [float(self.wire_s[hop]) for hop in hops]
        total = sum(loads) + sum(float(self.round_trip_s[hop]) for hop in hops)
        return total + (self.micro_batches - 1) * max(*loads, *wires, 0.0)


@dataclass(frozen=True)
class Soft:
    """The value at a limit and a temperature, and its gradient.

    Attributes:
        value_s: about the least step.
        by_limit: its derivative by the limit.
        cuts: [hop, cut]: the chance of each cut; the derivative by a round trip.
    """

    value_s: float
    by_limit: float
    cuts: Array


def soft_step(pipeline: Pipeline, limit_s: float, temperature_s: float) -> Soft | None:
    """Return the smooth least step; None when no split fits.

    hard - T log(splits) <= value <= hard + T (M - 1) (2 stages - 1) log 2, where hard is the least
    of the bound above at this limit.

    Args:
        pipeline: what is split.
        limit_s: t, which the busiest stage or hop had better keep.
        temperature_s: T > 0.
    """
    more, heat = pipeline.micro_batches - 1, temperature_s
    load_s = pipeline.load_s()
    over, steep = _softplus(load_s - limit_s, heat)
    pieces = _priced(load_s, over, more)
    hop_over, hop_steep = _softplus(pipeline.wire_s - limit_s, heat)
    hops = _priced(pipeline.round_trip_s, hop_over, more)
    before, after = _forward(pieces, hops, heat), _backward(pieces, hops, heat)
    total = before[-1][-1]
    if not np.isfinite(total):
        return None
    chance = np.stack(
        [
            _exp(total - (b[:-1, None] + piece + a[None, :]), heat)
            for b, piece, a in zip(before[:-1], pieces, after[1:], strict=True)
        ]
    )
    cuts = chance[:-1].sum(axis=1)
    busy = (chance * steep).sum() + (cuts * hop_steep).sum()
    return Soft(float(total + more * limit_s), float(more * (1.0 - busy)), cuts)


def hard_step(pipeline: Pipeline, limit_s: float) -> tuple[float, tuple[int, ...]] | None:
    """Return the limit of `soft_step` for no temperature, and its split; None when none fits."""
    more = pipeline.micro_batches - 1
    load_s = pipeline.load_s()
    pieces = _priced(load_s, np.maximum(0.0, load_s - limit_s), more)
    over = np.maximum(0.0, pipeline.wire_s - limit_s)
    hops = _priced(pipeline.round_trip_s, over, more)
    found = _shortest(pieces, hops)
    return None if found is None else (found[0] + more * limit_s, found[1])


def most_likely(pipeline: Pipeline, cuts: Array) -> tuple[int, ...] | None:
    """Return the split whose cuts have the largest product of chances, of those that fit."""
    pieces = np.where(pipeline.fits, 0.0, np.inf)
    found = _shortest(pieces, -np.log(np.maximum(cuts, 1e-300)))
    return None if found is None else found[1]


def gap_s(pipeline: Pipeline, temperature_s: float) -> tuple[float, float]:
    """Return how far the value may be below, and above, the hard one at a limit."""
    kinks = (pipeline.micro_batches - 1) * (2 * pipeline.stages - 1)
    return temperature_s * log(max(1, pipeline.splits)), temperature_s * kinks * log(2.0)


def _priced(cost_s: Array, over_s: Array, more: int) -> Array:
    """Return the cost with what is over the limit, which every further micro-batch pays again."""
    return cost_s + more * over_s if more else cost_s  # infinite costs stay as they are


def _softplus(x: Array, heat: float) -> tuple[Array, Array]:
    """Return the smooth max(0, x) and its derivative; infinite x: infinity, and a slope of 1."""
    scaled = np.clip(x / heat, -700.0, 700.0)
    value = np.where(x > 700.0 * heat, x, heat * np.logaddexp(0.0, scaled))
    return value, 1.0 / (1.0 + np.exp(-scaled))


def _exp(x: Array, heat: float) -> Array:
    """Return exp(x / heat) for x <= 0, minus infinity included."""
    found: Array = np.exp(np.maximum(x, -700.0 * heat) / heat)
    found[x < -699.0 * heat] = 0.0
    return found


def _soft_minimum(x: Array, heat: float, axis: int) -> Array:
    least = x.min(axis=axis)
    base = np.where(np.isfinite(least), least, 0.0)
    total = _exp(np.expand_dims(base, axis) - x, heat).sum(axis=axis)
    with np.errstate(divide="ignore"):
        found: Array = base - heat * np.log(total)
    return found


def _forward(pieces: Array, hops: Array, heat: float) -> list[Array]:
    """Return, per stage and one more, the soft cost of what comes before a stage's first unit."""
    found = [np.full(pieces.shape[2], np.inf)]
    found[0][0] = 0.0
    for stage, piece in enumerate(pieces):
        reached = _soft_minimum(found[-1][:-1, None] + piece, heat, axis=0)
        found.append(reached + hops[stage] if stage < len(hops) else reached)
    return found


def _backward(pieces: Array, hops: Array, heat: float) -> list[Array]:
    """Return, per stage and one more, the soft cost of what comes from its first unit on.

    The hop before a stage counts to it.
    """
    last = np.full(pieces.shape[2], np.inf)
    last[-1] = 0.0
    found = [last]
    for stage in range(len(pieces) - 1, -1, -1):
        rest = np.append(_soft_minimum(pieces[stage] + found[-1][None, :], heat, axis=1), np.inf)
        found.append(rest + hops[stage - 1] if stage else rest)
    return found[::-1]


def _shortest(pieces: Array, hops: Array) -> tuple[float, tuple[int, ...]] | None:
    """Return the least sum of pieces and hops, and the cuts of the split that has it."""
    reached = np.full(pieces.shape[2], np.inf)
    reached[0] = 0.0
    chosen: list[NDArray[np.intp]] = []
    for stage, piece in enumerate(pieces):
        ways = reached[:-1, None] + piece
        chosen.append(ways.argmin(axis=0))
        reached = ways.min(axis=0) + (hops[stage] if stage < len(hops) else 0.0)
    if not np.isfinite(reached[-1]):
        return None
    cuts = [pieces.shape[1]]
    for firsts in reversed(chosen):
        cuts.append(int(firsts[cuts[-1]]))
    return float(reached[-1]), tuple(reversed(cuts))
