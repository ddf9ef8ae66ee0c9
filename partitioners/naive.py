"""`naive`: the same number of ops for every device; what other methods are compared to."""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import work


@dataclass(frozen=True)
class Naive:
    """Give each device an equal number of consecutive ops, whatever they cost, in the list's order.

    That is what an even split by hand would be: alone of all methods it goes by the list.

    Ops that must stay together are not torn apart, so that numbers may differ by a group.
    """

    name = "naive"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known = work(graph, costs)
        names = [device.name for device in cluster.devices]
        total = sum(len(group) for group in known.groups)
        homes: list[str] = []
        before = 0
        for group in known.groups:
            homes.append(names[before * len(names) // total])
            before += len(group)
        reason = f"{total} ops in equal parts over {', '.join(dict.fromkeys(homes))}"
        return Placement(known.placed(homes, names[0]), reason)
