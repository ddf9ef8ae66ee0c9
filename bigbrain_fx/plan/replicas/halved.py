"""Replicas of whole backwards -> the same with backwards in two halves, where that is faster.

All of them get one schedule, so it is chosen for all together, after each was planned by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import fastest, least_gap, simplest
from bigbrain_fx.plan.halving import open_halves
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.progress import is_stopped


def halved(
    best: Plan,
    graph: Graph,
    cluster: Cluster,
    options: Options,
    make: Callable[[Options, int], Plan],
) -> Plan:
    """Return the best with split backwards, or as it is: where replicas have a device each, say.

    Args:
        best: with whole backwards.
        graph: with the whole batch.
        cluster: all devices.
        options: of all replicas together.
        make: plans them as other options say, with so many micro-batches.
    """
    if is_stopped() or len(cluster.devices) == best.stages.replicas:
        return best
    ways = (
        replace(options, schedule=name, effort="fast")
        for name in open_halves(graph, cluster, options)
    )
    tries = [partial(make, way, best.micro_batches) for way in ways]
    if not tries:
        return best
    try:
        plan = fastest(tries, but=(NoPlanError, InputError))
    except (NoPlanError, InputError):
        return best
    return simplest((best, plan), least_gap(cluster))
