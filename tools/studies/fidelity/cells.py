"""What `fidelity` compares: models, clusters, schedules, splits; and a balanced part of all.

A split is a partitioner, or a cut of the ops' order that gives each device a share of the work.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, OpCost, Placement
from bigbrain_fx.planning.units import units
from tools.studies.emulated_models import MODELS, SITES


@dataclass(frozen=True)
class Cell:
    """One thing to forecast and to measure."""

    model: str
    cluster: str
    schedule: str
    split: str

    def __str__(self) -> str:
        return f"{self.model}/{self.cluster}/{self.schedule}/{self.split}"

    @property
    def pair(self) -> tuple[str, str]:
        """Its model and cluster: cells that share them are candidates for the same choice."""
        return self.model, self.cluster


SCHEDULES = ("gpipe", "1f1b")
PARTITIONERS = ("naive", "analytical")
SHARES: Mapping[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "even": lambda speeds: [1.0] * len(speeds),
    "front": lambda speeds: _tilted(speeds, 0.5),
    "back": lambda speeds: _tilted(speeds, -0.5),
    "lean": lambda speeds: _tilted(speeds, 0.2),
}
"""Cuts by shares of the work, given the devices' speeds: the same for all, or speed times a weight
that falls (or rises) from the first device to the last.
"""
SPLITS = (*PARTITIONERS, *SHARES)
WAYS = tuple(itertools.product(SCHEDULES, SPLITS))


def _tilted(speeds: Sequence[float], tilt: float) -> Sequence[float]:
    last = len(speeds) - 1
    return [speed * (1 + tilt * (1 - 2 * i / last)) for i, speed in enumerate(speeds)]


def placed_by_shares(
    graph: Graph, cost_of: Callable[[str], OpCost], shares: Mapping[str, float]
) -> Placement:
    """Give each device, in order, consecutive groups of ops that come to its share of the time.

    Args:
        graph: concrete.
        cost_of: of an op, on whichever device: only ratios matter.
        shares: by device, in pipeline order; what they are shares of is their sum.
    """
    found = units(graph)
    costs = {op.name: cost_of(op.name) for op in graph.ops}
    work = [sum(costs[n].forward_s + costs[n].backward_s for n in g) for g in found.groups]
    names, whole = list(shares), sum(work)
    ends = [s * whole / sum(shares.values()) for s in itertools.accumulate(shares.values())]
    device_of = dict.fromkeys(found.replicated, names[0])
    done, at = 0.0, 0
    for group, seconds in zip(found.groups, work, strict=True):
        while at < len(names) - 1 and done + seconds / 2 > ends[at]:
            at += 1
        device_of |= dict.fromkeys(group, names[at])
        done += seconds
    return Placement(device_of, f"shares {dict(shares)}")


def placed_as(split: str, graph: Graph, costs: Costs, cluster: Cluster) -> Placement:
    """Return the placement of one of `SHARES`."""
    speeds = [device.flops_per_s for device in cluster.devices]
    shares = dict(zip((d.name for d in cluster.devices), SHARES[split](speeds), strict=True))
    first = cluster.devices[0].name
    return placed_by_shares(graph, lambda op: costs.op_cost(op, first), shares)


# --------------------------------------------------------------------------- which cells


def every() -> tuple[Cell, ...]:
    """Return the full product."""
    pairs = itertools.product(MODELS, SITES)
    return tuple(Cell(*pair, *way) for pair in pairs for way in WAYS)


def subset(count: int, seed: int = 0) -> tuple[Cell, ...]:
    """Choose cells: half of them whole pairs of held-out model and cluster, the rest spread.

    A whole pair has every schedule and split, so that plans can be ranked. The others are taken one
    at a time, always one whose parts, and pairs of parts, were taken least often.

    Returns:
        `count` cells, or all there are; ordered by cluster and model, as they are run.
    """
    cells = every()
    whole = set(_whole_pairs(count // (2 * len(WAYS)), seed))
    chosen = [cell for cell in cells if cell.pair in whole]
    waiting = [cell for cell in cells if cell.pair not in whole]
    random.Random(seed).shuffle(waiting)
    taken = Counter(part for cell in chosen for part in _parts(cell))
    while waiting and len(chosen) < count:
        best = min(waiting, key=lambda cell: sum(w * taken[p] for p, w in _parts(cell).items()))
        waiting.remove(best)
        chosen.append(best)
        taken.update(list(_parts(best)))
    return tuple(sorted(chosen, key=cells_in_order(cells).__getitem__))


def cells_in_order(cells: Sequence[Cell]) -> Mapping[Cell, tuple[int, int]]:
    """Map each cell to its place: cluster by cluster, within these in the product's order."""
    place = {name: i for i, name in enumerate(SITES)}
    return {cell: (place[cell.cluster], i) for i, cell in enumerate(cells)}


def is_held_out(cell: Cell) -> bool:
    """Say whether neither its model nor its cluster is one to calibrate with."""
    return not (MODELS[cell.model].calibrates or SITES[cell.cluster].calibrates)


def _whole_pairs(count: int, seed: int) -> Sequence[tuple[str, str]]:
    """Return held-out pairs, each model and each cluster in turn."""
    models = [name for name, model in MODELS.items() if not model.calibrates]
    sites = [name for name, site in SITES.items() if not site.calibrates]
    dice = random.Random(seed)
    dice.shuffle(models)
    dice.shuffle(sites)
    pairs = [
        (model, sites[(i + turn) % len(sites)])
        for turn in range(len(sites))
        for i, model in enumerate(models)
    ]
    return pairs[:count]


def _parts(cell: Cell) -> Mapping[tuple[str, ...], int]:
    """Return what a cell consists of, and how much a repetition of it counts."""
    model, cluster, schedule, split = cell.model, cell.cluster, cell.schedule, cell.split
    return {
        (model, cluster): 100,
        (model,): 3,
        (cluster,): 3,
        (schedule,): 3,
        (split,): 3,
        (model, schedule): 2,
        (model, split): 2,
        (cluster, schedule): 2,
        (cluster, split): 2,
        (schedule, split): 1,
    }
