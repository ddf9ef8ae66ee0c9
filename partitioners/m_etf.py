"""`m-etf`: the op that can start first goes where it can, while there is memory.

Source: Baechi (Jeon et al., SoCC'20), section 3.2. Without transfers and limits the makespan is at
most (2 - 1/devices) of the least one (Graham 1969).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph, Placement

from .baechi import prepared
from .jobs import Jobs, timetable


@dataclass(frozen=True)
class METF:
    """Place groups of ops by earliest start, as if one micro-batch went through alone.

    The method looks for branches that can run at once and respects memory. The method does not know
    pipelines: a chain that fits stays on one device.

    Attributes:
        micro_batches: per step; all of them may be in flight on every device.
        in_flight: how many may be; None: all. Of one number per device the largest counts.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    name = "m-etf"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        ready = prepared(graph, cluster, costs, self.micro_batches, self.in_flight)
        found = timetable(ready.jobs, ready.ledger(), self.favorites(ready.jobs))
        return ready.placement(found, self.name)

    def favorites(self, jobs: Jobs) -> Mapping[int, int]:
        """Return which job a device keeps itself free for after another; here none."""
        return {}
