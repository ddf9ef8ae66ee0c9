"""The protocols that plug-ins fulfil."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from bigbrain_fx.core.cluster import Cluster
from bigbrain_fx.core.costs import Costs
from bigbrain_fx.core.graph import Graph
from bigbrain_fx.core.placement import Placement


@runtime_checkable
class Partitioner(Protocol):
    """Decide which device runs which op."""

    name: str

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph (`graph.at(rows)`).

        Raises:
            NoPlanError: nothing fits.
        """
        ...


@runtime_checkable
class Estimator(Protocol):
    """Say what each op costs on each device."""

    name: str

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device."""
        ...


@runtime_checkable
class GroupEstimator(Estimator, Protocol):
    """An estimator whose figures depend on how many devices compute an op together."""

    def of_group(self, members: int) -> Estimator:
        """Return the estimator of one rank's graph, in groups of so many devices."""
        ...
