"""A plan, or an error that names the nearest change with which the planner itself found one.

It tries changes by planning again; it knows nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.making import make_plan
from bigbrain_fx.plan.memory_check import least_memory, mib
from bigbrain_fx.plan.nouns import Options, Plan, Source

_PLENTY = 1 << 60
_TOO_MANY_OPS = 2000  # planning again and again would take longer than a user waits for a refusal


def plan_or_remedy(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan:
    """Make a plan; where nothing fits, look for what would.

    Raises:
        NoPlanError: nothing fits in memory: the arithmetic per device, and the first of these with
            which a plan was found: more micro-batches, another schedule, another partitioner,
            recomputing activations, one more device like the last, more memory (of a large graph
            the memory only).
        InputError: the batch cannot be split as asked.
    """
    try:
        return make_plan(graph, cluster, source, options)
    except NoPlanError as error:
        options = replace(options, effort="fast")  # of `auto`: it is asked several times
        look = _memory if len(graph.ops) > _TOO_MANY_OPS else nearest_change
        found = look(graph, cluster, source, options)
        if found is None:
            raise
        help_ = f"a plan was found with {found}"
        raise NoPlanError(error.what, at=error.at, notes=error.notes, help=help_) from None


def nearest_change(graph: Graph, cluster: Cluster, source: Source, options: Options) -> str | None:
    """Return the first change with which the planner finds a plan that fits, if any."""
    for text, other_cluster, other in _changes(graph, cluster, options):
        if _planned(graph, other_cluster, source, other) is not None:
            return text
    return _memory(graph, cluster, source, options)


def _planned(graph: Graph, cluster: Cluster, source: Source, options: Options) -> Plan | None:
    try:
        return make_plan(graph, cluster, source, options)
    except (NoPlanError, InputError):
        return None


def _changes(
    graph: Graph, cluster: Cluster, options: Options
) -> Iterator[tuple[str, Cluster, Options]]:
    """Yield changes, the smallest first: what to say of each, and what to plan with."""
    asked = options.micro_batches
    if asked is not None and graph.static_batch is None:
        for count in range(asked + 1, graph.batch + 1):
            if graph.batch % count == 0:
                more = replace(options, micro_batches=count)
                yield f"--micro-batches {count}", cluster, more
    if options.schedule == "gpipe":
        yield "--schedule 1f1b", cluster, replace(options, schedule="1f1b")
    if options.partitioner != "chain-dp":
        other = replace(options, partitioner="chain-dp", partitioner_options=())
        yield "--partitioner chain-dp", cluster, other
    if graph.training and options.recompute != "all":
        yield "--recompute all", cluster, replace(options, recompute="all")
    last = cluster.devices[-1]
    one_more = replace(cluster, devices=(*cluster.devices, replace(last, name=_new_name(cluster))))
    yield f"one more device like {last.name}", one_more, options


def _new_name(cluster: Cluster) -> str:
    names = {device.name for device in cluster.devices}
    return next(name for i in range(len(names) + 1) if (name := f"more{i}") not in names)


def _memory(graph: Graph, cluster: Cluster, source: Source, options: Options) -> str | None:
    """Return the memory with which every device would hold its part of a plan."""
    plenty = _with_memory(cluster, _PLENTY)
    free = _planned(graph, plenty, source, options)
    if free is None:
        return None
    enough = least_memory(free.forecast, cluster, graph.at(free.rows), free.micro_batches)
    given = replace(options, micro_batches=free.micro_batches)
    if _planned(graph, _with_memory(cluster, enough), source, given) is None:
        return None
    return f"{mib(enough)} of memory for every device"


def _with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)
