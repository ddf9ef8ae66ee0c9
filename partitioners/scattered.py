"""`scattered`: ops thrown over the devices by a seeded die; the worst case for the cut.

A test method: many stages, many messages and a slow step, and all of that must still be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import canonical, work


@dataclass(frozen=True)
class Scattered:
    """Give each unit of ops to a random device.

    Attributes:
        seed: of the die; equal seeds make equal placements of equal graphs.
    """

    seed: int = 0
    name = "scattered"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known, cluster = work(graph, costs), canonical(cluster, costs)
        names = [device.name for device in cluster.devices]
        dice = random.Random(self.seed)
        homes = [dice.choice(names) for _ in known.groups]
        reason = f"{len(homes)} groups of ops at random, seed {self.seed}"
        return Placement(known.placed(homes, names[0]), reason)
