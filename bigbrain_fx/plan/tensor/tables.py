"""Embedding tables that a group divides since its replicas would sum them: no work, but bytes.

    replica 0  |rows 0..n/2|rows n/2..n|         each member sums its rows with those of the same
               ─────┼────────────┼──────         member elsewhere, in place of the whole table twice
    replica 1  |rows 0..n/2|rows n/2..n|

A lookup divides no work, so that axes are not chosen for it. It costs a sum of what was looked up
inside of the group, and saves a part of sums between replicas, whose links are slower as a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import Axis, Cluster, Graph
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replicas import divide, replica_count
from bigbrain_fx.plan.shard import table_axes
from bigbrain_fx.plan.simulate.collectives import Ring
from bigbrain_fx.plan.tensor.asked import named_axes, wanted_axes
from bigbrain_fx.plan.tensor.exchange import sum_s


def axes_of_replicas(graph: Graph, cluster: Cluster, options: Options) -> tuple[Axis, ...]:
    """Return the axes that all replicas divide: those of their work, and tables where that pays.

    Args:
        graph: as captured.
        cluster: all devices.
        options: of replicas that are tensor groups, or pipelines of them.

    Raises:
        InputError: as `wanted_axes` does.
    """
    chosen = wanted_axes(graph, options)
    if options.tensor_tried or options.tensor_axes:
        return chosen
    members = options.tensor or 1
    left = table_axes(named_axes(graph, options), chosen, members)
    replicas = divide(cluster, replica_count(cluster, options), members)
    sums = _Sums(cluster, options, replicas)
    return (*chosen, *(axis for axis in left if sums.saved_s(axis) > sums.paid_s(axis)))


def with_tables(graph: Graph, options: Options) -> Options | None:
    """Return options that divide what is chosen and all tables; None: there are none, or axes.

    Raises:
        InputError: as `wanted_axes` does.
    """
    chosen = wanted_axes(graph, options)
    tables = table_axes(named_axes(graph, options), chosen, options.tensor or 1)
    is_given = options.tensor_tried or options.tensor_axes
    return replace(options, tensor_tried=(*chosen, *tables)) if tables and not is_given else None


class _Sums:
    """What sums take between replicas, and inside of their groups."""

    def __init__(
        self, cluster: Cluster, options: Options, replicas: Sequence[Sequence[str]]
    ) -> None:
        self.cluster, self.replicas, self.members = cluster, replicas, options.tensor or 1
        self.micro_batches = options.micro_batches or 1

    def saved_s(self, axis: Axis) -> float:
        """Return what replicas' sums take less: rings, of all members beside each other."""
        count, ring = len(self.replicas), Ring(self.cluster, tuple(r[0] for r in self.replicas))
        nbytes = 2 * (count - 1) * axis.nbytes * (1 - 1 / self.members) / count
        shared = (self.members * taken for taken in ring.nics_s(int(nbytes)).values())
        return max(ring.wire_s(int(nbytes)), *shared, 0.0)

    def paid_s(self, axis: Axis) -> float:
        """Return what a replica's micro-batches take to add up what their members looked up."""
        group, many = self.replicas[0][: self.members], len(self.replicas) * self.micro_batches
        sent = axis.sent_bytes(backward=False), axis.sent_bytes(backward=True)
        return self.micro_batches * sum(sum_s(n // many, self.cluster, group) for n in sent if n)
