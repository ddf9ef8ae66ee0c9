"""`compiled`: as `analytical`, for GPUs that run under torch.compile with CUDA graphs.

A process starts no op by itself there, and passes over memory that follow each other move what is
between them not at all. Bundles are not compiled: it says what that would be worth. A CPU's ops are
as in `analytical`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Graph

from .analytical import estimated


@dataclass(frozen=True)
class Compiled:
    """Estimate as analytical does, with fused passes and without a host clock on GPUs."""

    name = "compiled"

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device."""
        return estimated(graph, cluster, fused=True)
