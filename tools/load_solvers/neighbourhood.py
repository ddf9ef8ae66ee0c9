"""Placement of a problem -> a better one: a few devices are placed again, exactly; and so on.

Large-neighbourhood search (Shaw, CP'98) for the largest load. The busiest device and one or two
others give up their nodes, or some of them that lie together; where these are best put is an
integer program (Tarnawski et al., NeurIPS'20, section 5, without contiguity) under a limit that is
counted in work, so that equal seeds give equal answers on any machine. It knows loads; it knows no
graph and no files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from partitioners.neighbours import neighbours
from tools.load_solvers.loads import sent_pairs
from tools.load_solvers.problem import Problem
from tools.load_solvers.programs import Entry, Program, available

MOST_COLUMNS = 240  # nodes x devices that are placed again at once
_BETTER = 1 - 1e-7
_TREE = 400  # nodes of the search tree, for each program


@dataclass(frozen=True, slots=True)
class Region:
    """What is placed again: these nodes, on these devices; all else stays."""

    nodes: tuple[int, ...]
    devices: tuple[int, ...]


def polished(
    problem: Problem, homes: Sequence[int], programs: int, seed: int = 0
) -> tuple[int, ...]:
    """Return a placement that is no worse than the one given, and fits if that does.

    Args:
        problem: what is placed.
        homes: where to start.
        programs: how many integer programs may be solved; none are without scipy.
        seed: of the choice of regions; equal seeds give equal placements.
    """
    best = tuple(homes)
    if len(problem.kind_of_device) < 2 or problem.count < 2 or not available():
        return best
    choice = _Choice(problem, random.Random(seed))
    regions = choice.regions(best)
    for _ in range(programs):
        region = next(regions, None)
        if region is None:
            break  # nothing left to try
        found = placed_again(problem, best, region)
        if found is not None:
            best = found
            regions = choice.regions(best)
    return best


def placed_again(
    problem: Problem, homes: Sequence[int], region: Region, tree: int = _TREE
) -> tuple[int, ...] | None:
    """Return the placement with a region's nodes where they are best; None: nothing better found.

    Better is a smaller largest load among the region's devices; that of others does not change.
    """
    loads = problem.loads(homes)
    now = max(float(loads[device]) for device in region.devices)
    written = _Written(problem, homes, region, now * _BETTER)
    found = written.program.solved(tree).columns
    if found is None:
        return None
    answer = list(homes)
    for node in region.nodes:
        shares = [found[column] for column in written.columns_of(node)]
        answer[node] = region.devices[int(np.argmax(shares))]
    new = problem.loads(answer)
    better = max(float(new[d]) for d in region.devices) < now * (1 - 1e-9)
    return tuple(answer) if better and problem.fits(answer) else None


class _Choice:
    """Draws regions: mutable by its dice."""

    def __init__(self, problem: Problem, dice: random.Random) -> None:
        self.problem, self.dice = problem, dice
        self._near = neighbours(problem.count, sent_pairs(problem))

    def regions(self, homes: Sequence[int]) -> Iterator[Region]:
        """Yield the busiest device with each other one, the idlest first; then with each two."""
        loads = self.problem.loads(homes)
        top = int(loads.argmax())
        others = [device for device in range(len(loads)) if device != top]
        others.sort(key=lambda device: (loads[device], device))
        groups = [(other,) for other in others]
        for group in (*groups, *combinations(others, 2)):
            if self._alike(homes, group):
                continue
            devices = (top, *group)
            mine = [node for node, home in enumerate(homes) if home in devices]
            most = max(2, MOST_COLUMNS // len(devices))
            if len(mine) <= most:
                yield Region(tuple(mine), devices)
                continue
            for _ in range(len(mine) // most + 1):
                yield Region(self._together(homes, mine, devices, most), devices)

    def _alike(self, homes: Sequence[int], group: Sequence[int]) -> bool:
        """Whether devices without work are in it that a pair with one of them has tried."""
        idle = [self.problem.kind_of_device[d] for d in group if d not in homes]
        return len(set(idle)) < len(idle)

    def _together(
        self, homes: Sequence[int], mine: Sequence[int], devices: Sequence[int], most: int
    ) -> tuple[int, ...]:
        """Draw nodes of these devices that hang together, some of them of the busiest."""
        dice, left = self.dice, dict.fromkeys(mine)
        top = [node for node in mine if homes[node] == devices[0]]
        queue = [dice.choice(top or mine), dice.choice(mine)]
        found: list[int] = []
        while len(found) < most:
            if not queue:
                queue.append(dice.choice(list(left)))
            node = queue.pop(0)
            if node in left:
                del left[node]
                found.append(node)
                queue += self._near[node]
        return tuple(sorted(found))


class _Written:
    """The integer program of a region.

    Columns: x[node, device], whole; for each value and device, whether it pays for it; and T.
    Rows: each device's load is at most T, and it holds its nodes; each node is on one device.
    """

    def __init__(
        self, problem: Problem, homes: Sequence[int], region: Region, under: float
    ) -> None:
        self.problem, self.homes, self.region = problem, homes, region
        self.program = Program()
        self._kinds = [problem.kind_of_device[device] for device in region.devices]
        self._x = {node: self._columns(node) for node in region.nodes}
        self._loads: list[list[Entry]] = [[] for _ in region.devices]
        self._fixed = [0.0] * len(region.devices)
        top = self.program.column(upper=under, cost=1.0)
        self._pay_for_values()
        for d in range(len(region.devices)):
            self._limit(d, top)
        for columns in self._x.values():
            self.program.row([(column, 1.0) for column in columns], 1.0, 1.0)

    def columns_of(self, node: int) -> Sequence[int]:
        """Return the columns that say on which device a node is."""
        return self._x[node]

    def _columns(self, node: int) -> list[int]:
        runs = [np.isfinite(self.problem.times[kind, node]) for kind in self._kinds]
        return [self.program.column(float(each), whole=True) for each in runs]

    def _limit(self, d: int, top: int) -> None:
        """Write that a device's load is at most T, and that its memory is enough."""
        problem, kind, device = self.problem, self._kinds[d], self.region.devices[d]
        times, room = problem.times[kind], problem.kinds[kind].memory_bytes
        stay = [
            node for node, home in enumerate(self.homes) if home == device and node not in self._x
        ]
        fixed = self._fixed[d] + float(times[stay].sum())
        runs = [node for node in self._x if np.isfinite(times[node])]
        load = [(self._x[node][d], float(times[node])) for node in runs]
        self.program.row([*load, *self._loads[d], (top, -1.0)], most=-fixed)
        if np.isfinite(room):
            unit = max(room, 1.0)
            held = [(self._x[node][d], float(problem.nbytes[node]) / unit) for node in self._x]
            self.program.row(held, most=(room - float(problem.nbytes[stay].sum())) / unit)

    def _pay_for_values(self) -> None:
        """Write when each device pays for each value."""
        mine = set(self.region.devices)
        for net in self.problem.nets:
            free = [node for node in net.members if node in self._x]
            fixed = {self.homes[node] for node in net.members if node not in self._x}
            if free or fixed & mine:
                for d, device in enumerate(self.region.devices):
                    self._pay(d, net.times[self._kinds[d]], free, device in fixed, fixed - {device})

    def _pay(self, d: int, wire: float, free: Sequence[int], here: bool, others: set[int]) -> None:
        """Write when a device pays for one value: others of its nodes are here, or elsewhere."""
        if not wire:
            return
        if here and others:
            self._fixed[d] += wire
            return
        if not free:
            return
        paid = self.program.column()
        self._loads[d].append((paid, wire))
        if others:  # when one is put here
            for node in free:
                self.program.row([(paid, 1.0), (self._x[node][d], -1.0)], least=0.0)
        elif here:  # when one is put elsewhere
            for node in free:
                self.program.row([(paid, 1.0), (self._x[node][d], 1.0)], least=1.0)
        else:  # when one, but not the first, is here; or the first, but not all
            first = self._x[free[0]][d]
            for node in free[1:]:
                other = self._x[node][d]
                self.program.row([(paid, 1.0), (first, -1.0), (other, 1.0)], least=0.0)
                self.program.row([(paid, 1.0), (first, 1.0), (other, -1.0)], least=0.0)
