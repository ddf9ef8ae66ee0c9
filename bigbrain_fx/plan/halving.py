"""Options -> the schedules of split backwards that a search tries although nobody asked for them.

It knows options and kinds of devices; it makes no plan. What such a plan must be faster by is
`apart`'s to say: to a reader of the bundle a whole backward is simpler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.plan.compatibility import Request, conflict
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.schedule import Synthesised, ZeroBubbleH1, ZeroBubbleV
from bigbrain_fx.plan.search import MANY_DEVICES

HALVES: Mapping[str, bool] = {
    ZeroBubbleH1.name: True,
    ZeroBubbleV.name: True,
    Synthesised.name: False,
}
"""By name; whether one is for a line of one piece a device only."""


def open_halves(graph: Graph, cluster: Cluster, options: Options) -> Mapping[str, bool]:
    """Return those of `HALVES` that go with what was asked for, where an order was left open.

    None on GPUs, where halves of a backward were never measured, and none on so many devices that
    one order takes seconds to search.
    """
    is_asked = options.schedule or options.in_flight or options.defer is not None
    if is_asked or not graph.training or options.objective == "memory":
        return {}
    if len(cluster.devices) > MANY_DEVICES or any(d.kind != "cpu" for d in cluster.devices):
        return {}
    asked = {name: replace(options, schedule=name) for name in HALVES}
    return {n: HALVES[n] for n, o in asked.items() if not conflict(Request(o, cluster, graph))}
