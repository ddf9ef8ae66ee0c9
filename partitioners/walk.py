"""A placement of any shape -> a better one by seeded random walks, each simulated by deltas.

A walk goes over the clock's estimate of a step, unit by unit; where it ends is judged stage by
stage, and the next begins at the best so far. Pieces of the graph are moved as a whole, because
single units that are dear to cut off never leave.

Source: FlexFlow (Jia et al., MLSys'19), section 6.2: Metropolis over placements, a simulator as its
cost; memory is a limit here, not a cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import exp

from bigbrain_fx.planning import Work

from .delta_clock import DeltaClock, Timing
from .evaluate import Evaluator, Homes
from .memory_bound import Ledger, MemoryBound, is_acyclic, upstream

MOST_UNITS = 400  # more are taken in runs, where little crosses between them
WALKS = 8  # each begins at the best so far; every other one keeps to pipelines
_HOT, _COLD, _DOWN = 0.003, 0.0001, 1e-6  # temperatures, in shares of a step; the last goes down
_SHARPNESS = 12  # of the smooth maximum over devices and links
_LARGEST_PIECES = (1, 1, 1, 2, 2, 4, 8, 16, 32)
_SWAPS = 0.25
_BORDER_TRIES = 30  # draws of a unit at a border before any will do


def improve(
    evaluator: Evaluator, homes: Homes, proposals: int, seed: int = 0, walks: int = WALKS
) -> Homes:
    """Return a placement that the evaluator finds no slower than the one given, and that fits.

    Args:
        evaluator: of placements.
        homes: where to begin.
        proposals: moves tried in all.
        seed: of the walks; equal seeds give equal placements.
        walks: in how many.
    """
    if len(evaluator.cluster.devices) < 2 or len(homes) < 2 or proposals < 1:
        return homes
    best, bound = homes, evaluator.bound
    runs, known = coarse(evaluator.known, homes)
    timing = Timing(known, bound.cluster, bound.micro_batches)
    merged = replace(bound, known=known)
    for number in range(walks):
        first = [best[run[0]] for run in runs]
        pipelines = number % 2 == 1 and is_acyclic(upstream(known, first))
        walk = _Walk(timing, merged, first, random.Random(seed + number), pipelines)
        last = number == walks - 1
        heat = (_DOWN, _DOWN) if last else (_HOT, _COLD)
        end = walk.run(proposals // walks, *heat)
        found = [home for run, home in zip(runs, end, strict=True) for _ in run]
        best = evaluator.best([best, tuple(found)]) or best
    return best


def coarse(known: Work, homes: Sequence[int], most: int = MOST_UNITS) -> tuple[list[range], Work]:
    """Return runs of units to move as one, and their facts; no run has two homes."""
    changes = {i for i in range(1, len(homes)) if homes[i] != homes[i - 1]}
    cuts = sorted(changes.union(_quiet_cuts(known, most)))
    runs = [range(a, b) for a, b in pairwise(cuts)]
    return runs, known.merged(runs)


def _quiet_cuts(known: Work, most: int) -> list[int]:
    """Return the places to cut the units, in their order, into at most `most` runs.

    One in each of `most` equal parts, where the fewest bytes cross; 0 and the end are included.
    """
    count = known.count
    if count <= most:
        return list(range(count + 1))
    crossing = [0] * (count + 1)
    for value in known.values:
        crossing[value.maker + 1] += value.nbytes
        crossing[value.readers[-1] + 1] -= value.nbytes
    at_cut = list(accumulate(crossing))
    parts = pairwise(round(i * count / most) for i in range(most + 1))
    inner = {min(range(a + 1, b + 1), key=at_cut.__getitem__) for a, b in parts}
    return sorted({0, count, *inner})


class _Walk:
    """A random walk over placements: mutable, used once.

    Args:
        timing: what everything takes.
        bound: what fits.
        homes: the device of every unit.
        rng: random numbers that moves are drawn by.
        pipelines: whether placements count only where no device depends on itself through others,
            so that each is one stage; then mostly units at a border are moved.
    """

    def __init__(
        self,
        timing: Timing,
        bound: MemoryBound,
        homes: Sequence[int],
        rng: random.Random,
        pipelines: bool,
    ) -> None:
        self.clock, self.ledger = DeltaClock(timing, homes), Ledger(bound, homes)
        self.homes = self.clock.homes  # the same list
        self.bound, self.rng, self.pipelines = bound, rng, pipelines
        self._devices = len(bound.cluster.devices)
        self._near = _neighbours(bound.known)
        self.best = tuple(homes)
        self._least, self._energy = self.clock.cost(), self.energy()

    def run(self, steps: int, hot: float, cold: float) -> tuple[int, ...]:
        """Return the best placement met; the first one if nothing better that fits was."""
        for step in range(steps):
            self._step(hot * (cold / hot) ** (step / steps))
        return self.best

    def energy(self) -> float:
        """Return the step with a smooth maximum in it: the second busiest counts a little."""
        clock, top = self.clock, self.clock.most()
        more = clock.timing.micro_batches - 1
        if top <= 0 or not more:
            return float(clock.cost())
        loads = (*clock.device_ticks, *clock.link_ticks.values())
        total: float = sum((load / top) ** _SHARPNESS for load in loads if load > 0)
        return float(clock.alone()) + more * float(top * total ** (1 / _SHARPNESS))

    def fits(self) -> bool:
        """Whether every device can hold what it has, as a pipeline if it is one."""
        roomy = all(self.ledger.fits(device) for device in range(self._devices))
        if roomy and not self.pipelines:
            return True
        if not is_acyclic(upstream(self.bound.known, self.homes)):
            return False
        names = [device.name for device in self.bound.cluster.devices]
        return roomy or self.bound.fits([names[home] for home in self.homes])

    def _step(self, heat: float) -> None:
        """Try one move."""
        moves = self._swap() if self.rng.random() < _SWAPS else self._shift()
        back = [(unit, self.homes[unit]) for unit, _ in moves]
        self._move(moves)
        energy = self.energy()
        if not (self.fits() and self._accepts(energy, heat)):
            self._move(back)
            return
        self._energy = energy
        if self.clock.cost() < self._least * (1 - 1e-12):
            self._least = self.clock.cost()
            self.best = tuple(self.homes)

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        for unit, to in moves:
            self.clock.move(unit, to)
            self.ledger.move(unit, to)

    def _accepts(self, energy: float, heat: float) -> bool:
        worse = energy - self._energy
        return worse <= 0 or self.rng.random() < exp(-worse / max(heat * self._energy, 1e-300))

    def _shift(self) -> list[tuple[int, int]]:
        """Draw units of one device that hang together, and a device to move them to.

        Mostly a device of a neighbour of theirs; now and then any.
        """
        rng, homes = self.rng, self.homes
        first = rng.randrange(len(homes))
        for _ in range(_BORDER_TRIES if self.pipelines else 0):
            if any(homes[other] != homes[first] for other in self._near[first]):
                break
            first = rng.randrange(len(homes))
        at, piece = homes[first], self._piece(first)
        around = [homes[other] for unit in piece for other in self._near[unit]]
        others = [home for home in around if home != at]
        if others and rng.random() < 0.9:
            to = others[rng.randrange(len(others))]
        else:
            to = rng.randrange(self._devices - 1)
            to += to >= at
        return [(unit, to) for unit in piece]

    def _piece(self, first: int) -> list[int]:
        """Draw units on one device, grown from the first in any direction."""
        most, at = self.rng.choice(_LARGEST_PIECES), self.homes[first]
        piece, edge = {first: None}, list(self._near[first])
        while edge and len(piece) < most:
            unit = edge.pop(self.rng.randrange(len(edge)))
            if unit not in piece and self.homes[unit] == at:
                piece[unit] = None
                edge += self._near[unit]
        return list(piece)

    def _swap(self) -> list[tuple[int, int]]:
        """Draw a unit of the busiest device and one of another, to change places."""
        rng, homes, ticks = self.rng, self.homes, self.clock.device_ticks
        top = ticks.index(max(ticks))
        mine = [unit for unit, home in enumerate(homes) if home == top]
        other = rng.randrange(len(homes))
        if not mine or homes[other] == top:
            return []
        return [(mine[rng.randrange(len(mine))], homes[other]), (other, top)]


def _neighbours(known: Work) -> list[list[int]]:
    """Return, for each unit, those that it reads or that read it, sorted."""
    near: list[set[int]] = [set() for _ in known.groups]
    for a, b in known.edges:
        near[a].add(b)
        near[b].add(a)
    return [sorted(each) for each in near]
