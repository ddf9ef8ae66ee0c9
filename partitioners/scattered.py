"""`scattered`: ops thrown over the devices by a seeded die; the worst case for the cut.

A test method: many stages, many messages and a slow step, and all of that must still be right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import canonical, work
from partitioners.footprint import require_fits


@dataclass(frozen=True)
class Scattered:
    """Give each unit of ops to a random device.

    Attributes:
        micro_batches: per step; all of them may be in flight on every device.
        in_flight: how many may be; None: all. One number per device, or one for all.
        seed: of the die; equal seeds make equal placements of equal graphs.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    name = "scattered"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known, listed = work(graph, costs), cluster
        cluster = canonical(cluster, costs)
        names = [device.name for device in cluster.devices]
        dice = random.Random(self.seed)
        homes = [dice.choice(names) for _ in known.groups]
        flights = {name: self._in_flight(index) for index, name in enumerate(listed.device)}
        require_fits(known, cluster, homes, flights, self.name, one_stage_each=False)
        reason = f"{len(homes)} groups of ops at random, seed {self.seed}"
        return Placement(known.placed(homes, names[0]), reason)

    def _in_flight(self, device: int) -> int:
        if self.in_flight is None:
            return self.micro_batches
        if isinstance(self.in_flight, int):
            return min(self.in_flight, self.micro_batches)
        return min(self.in_flight[device], self.micro_batches)
