"""`m-sct`: `m-etf`, where a device waits for the favorite child of what it has just run.

Source: Baechi (Jeon et al., SoCC'20), section 3.3, after Hanen and Munier (ETFA'95); the linear
program is solved by HiGHS. The guarantee holds for transfers shorter than ops, which operator
graphs do not keep to.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement

from .baechi import favorite_children, prepared
from .jobs import timetable
from .memory_bound import Ledger


@dataclass(frozen=True)
class MSCT:
    """Place groups of ops by earliest start, keeping a device free for a favorite child.

    Attributes:
        micro_batches: per step; all of them may be in flight on every device.
        in_flight: how many may be; None: all. Of one number per device the largest counts.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    name = "m-sct"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        ready = prepared(graph, cluster, costs, self.micro_batches, self.in_flight)
        found = timetable(ready.jobs, Ledger(ready.bound), favorite_children(ready.jobs))
        return ready.placement(found, self.name)
