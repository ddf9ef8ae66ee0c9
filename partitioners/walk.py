"""A placement -> a better one by seeded random walks, each simulated by deltas.

The walk (`anneal`) goes over the clock's estimate of a step, unit by unit; where a walk ends is
judged stage by stage, and the next begins at the best so far. It knows no way to begin.

Source: FlexFlow (Jia et al., MLSys'19), section 6.2: Metropolis over placements, a simulator as its
cost; memory is a limit here, not a cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.planning import Work
from partitioners.anneal import walked
from partitioners.clock import Clock, Timing
from partitioners.coarse import blocks, quiet_cuts
from partitioners.judge import Homes, Judge
from partitioners.neighbours import neighbours
from partitioners.room import Ledger, Room, is_pipeline

MOST_UNITS = 400  # more are taken in runs, where little crosses between them
_SHARPNESS = 12  # of the smooth maximum over devices and links
WARM = (0.003, 0.0001)  # temperature at first and last, in shares of a step
COLD = (1e-6, 1e-6)  # no way but down


@dataclass(frozen=True)
class Improving:
    """How to walk.

    Attributes:
        proposals: moves tried in all.
        seed: of the walks.
        walks: in how many; each begins at the best so far, every other one keeps to pipelines,
            and the last goes only down.
        heat: temperature at first and last, in shares of a step.
        micro_batches: that the objective counts; None for those of a step.
    """

    proposals: int
    seed: int = 0
    walks: int = 8
    heat: tuple[float, float] = WARM
    micro_batches: int | None = None


def improved(judge: Judge, homes: Homes, search: Improving) -> Homes:
    """Return a placement that the judge finds no slower than the one given, and that fits."""
    if len(judge.cluster.devices) < 2 or len(homes) < 2 or search.proposals < 1:
        return homes
    micro_batches = search.micro_batches or judge.micro_batches
    best = homes
    runs, known = coarse(judge.known, homes)
    timing = Timing(known, judge.cluster, micro_batches)
    room = Room(known, judge.cluster, judge.micro_batches, judge.in_flight)
    near = neighbours(len(known.groups), known.edges)
    for walk in range(search.walks):
        first = [best[run[0]] for run in runs]
        pipelines = walk % 2 == 1 and is_pipeline(known, first)
        state = Walked(timing, room, first, pipelines)
        heat = search.heat if walk < search.walks - 1 else COLD
        steps = search.proposals // search.walks
        devices = len(judge.cluster.devices)
        end = walked(state, near, devices, steps, search.seed + walk, heat, pipelines)
        found = [0] * len(homes)
        for run, home in zip(runs, end, strict=True):
            for unit in run:
                found[unit] = home
        best = judge.best([best, tuple(found)], micro_batches) or best
    return best


def coarse(known: Work, homes: Sequence[int], most: int = MOST_UNITS) -> tuple[list[range], Work]:
    """Return runs of units to move as one, and their facts; no run has two homes."""
    changes = {i for i in range(1, len(homes)) if homes[i] != homes[i - 1]}
    runs = blocks(sorted(changes.union(quiet_cuts(known, most))))
    return runs, known.merged(runs)


class Walked:
    """A placement that knows its times and its memory, kept up to date move by move.

    Args:
        timing: what everything takes.
        room: what fits.
        homes: the device of every unit.
        pipelines: whether placements count only where no device depends on itself through others,
            so that each is one stage.
    """

    def __init__(
        self, timing: Timing, room: Room, homes: Sequence[int], pipelines: bool = False
    ) -> None:
        self.clock, self.ledger = Clock(timing, homes), Ledger(room, homes)
        self.homes = self.clock.homes  # the same list
        self._pipelines = pipelines

    def move(self, node: int, to: int) -> None:
        """Put a unit on another device."""
        self.clock.move(node, to)
        self.ledger.move(node, to)

    def runs(self, node: int, to: int) -> bool:
        """Whether a device can run a unit: any can."""
        return True

    def fits(self) -> bool:
        """Whether every device can hold what it has."""
        if self._pipelines and not is_pipeline(self.ledger.room.known, self.homes):
            return False
        return self.ledger.fits()

    def value(self) -> float:
        """Return about what a step takes, in ticks."""
        return float(self.clock.cost())

    def energy(self) -> float:
        """Return the value with a smooth maximum in it: the second busiest counts a little."""
        top = self.clock.most()
        more = self.clock.timing.micro_batches - 1
        if top <= 0 or not more:
            return float(self.clock.cost())
        loads = (*self.clock.device_ticks, *self.clock.link_ticks.values())
        total: float = sum((load / top) ** _SHARPNESS for load in loads if load > 0)
        return float(self.clock.alone()) + more * float(top * total ** (1 / _SHARPNESS))

    def busiest(self) -> int:
        """Return the device that has most to do."""
        return self.clock.device_ticks.index(max(self.clock.device_ticks))
