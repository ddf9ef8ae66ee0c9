"""`scattered`: ops thrown over the devices by a seeded die; the worst case for the cut.

A test method: many stages, many messages and a slow step, and all of that must still be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import canonical, work

from .memory_bound import MemoryBound


@dataclass(frozen=True)
class Scattered:
    """Give each unit of ops to a random device.

    Attributes:
        micro_batches: per step; all of them may be in flight on every device.
        in_flight: how many may be; None: all. Of one number per device the largest counts.
        seed: of the die; equal seeds make equal placements of equal graphs.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    name = "scattered"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known, cluster = work(graph, costs), canonical(cluster, costs)
        names = [device.name for device in cluster.devices]
        dice = random.Random(self.seed)
        homes = [dice.choice(names) for _ in known.groups]
        bound = MemoryBound(known, cluster, self.micro_batches, self.in_flight)
        bound.require_fits(homes, self.name)
        reason = f"{len(homes)} groups of ops at random, seed {self.seed}"
        return Placement(known.placed(homes, names[0]), reason)
