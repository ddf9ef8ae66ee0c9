"""A test method of placing: the parameters in equal numbers on each side of the cut.

Small models would else be cut before their loss, and no optimizer be parted.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import work


@dataclass(frozen=True)
class Halves:
    """Give each device an equal number of consecutive groups of ops that read parameters."""

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    name = "halves"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known = work(graph, costs)
        names = [device.name for device in cluster.devices]
        reads = [any(graph.op[op].params for op in group) for group in known.groups]
        total, homes, before = max(1, sum(reads)), [], 0
        for has in reads:
            before += has
            homes.append(names[max(0, before - 1) * len(names) // total])
        return Placement(known.placed(homes, names[0]), "halves")
