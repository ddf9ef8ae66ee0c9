"""Options that leave groups open -> groupings with their axes, the most promising first.

    speeds ──▶ groupings ──axes that pay──▶ about the least step of each ──▶ in that order

It plans nothing: `GroupTry.plan` does, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import Axis, Cluster, Graph, TensorParallel
from bigbrain_fx.plan.judge import by_partitioner
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor.asked import named_axes
from bigbrain_fx.plan.tensor.bounds import Prices
from bigbrain_fx.plan.tensor.choices import axis_choices
from bigbrain_fx.plan.tensor.groupings import Grouping, groupings
from bigbrain_fx.plan.tensor.make import GroupMaker


@dataclass(frozen=True)
class GroupTry:
    """One grouping that may be planned.

    Attributes:
        least_s: about the least that its step can take.
    """

    grouping: Grouping
    least_s: float
    make: Callable[[], Plan]

    def plan(self) -> Plan:
        """Plan it, by the partitioner that was asked for.

        Raises:
            NoPlanError: it does not fit in memory.
        """
        return self.make()


def tensor_tries(
    graph: Graph, cluster: Cluster, source: Source, options: Options, *, fits: bool
) -> tuple[GroupTry, ...]:
    """Return what may be planned, the most promising first.

    Args:
        graph: as captured.
        cluster: all devices.
        source: what the model file says besides.
        options: whose axes, where they are named, are all that is divided.
        fits: whether a pipeline has a plan: then only axes that pay are divided.
    """
    axes = [axis for axis in named_axes(graph, options) if axis.flops and axis.params]
    if not axes:
        return ()
    rows = graph.static_batch or graph.batch
    costs = estimated(graph.at(rows), cluster, source, options.estimator)
    prices = Prices(costs.alone or costs, cluster, graph.batch // rows)
    every = groupings(cluster, prices.speeds(), max(axis.size for axis in axes))
    found = []
    for grouping in every:
        divided = _divided(axes, grouping, prices, fits=fits)
        if divided:
            least_s = prices.least_s(divided, grouping)
            maker = _maker(graph, cluster, source, options, grouping, divided)
            found.append(GroupTry(grouping, least_s, maker))
    return tuple(sorted(found, key=lambda each: each.least_s))


def _divided(
    axes: Sequence[Axis], grouping: Grouping, prices: Prices, *, fits: bool
) -> tuple[Axis, ...]:
    chosen = chosen_axes(axes, grouping.members)
    return prices.paying(chosen, grouping) if fits else chosen


def _maker(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    grouping: Grouping,
    axes: tuple[Axis, ...],
) -> Callable[[], Plan]:
    chosen = replace(options, tensor=grouping.members)

    def make(axes: tuple[Axis, ...]) -> Plan:
        tensor = TensorParallel(grouping.groups, grouping.shares, axes)
        return by_partitioner(GroupMaker(graph, cluster, source, chosen, tensor))

    return lambda: _with_fewer(make(axes), make)


def _with_fewer(plan: Plan, make: Callable[[tuple[Axis, ...]], Plan]) -> Plan:
    """Return the plan, or one that leaves axes of alike layers whole while that is faster."""
    while True:
        whole = [each for each in axis_choices(plan) if each.whole_s is not None]
        least = min(whole, key=lambda each: each.whole_s or 0.0, default=None)
        tensor = plan.placement.tensor
        assert tensor is not None
        if least is None or (least.whole_s or 0.0) >= plan.forecast.step_s or len(whole) < 2:
            return plan
        fewer = make(tuple(axis for axis in tensor.axes if axis.name not in least.axes))
        if fewer.forecast.step_s >= plan.forecast.step_s:
            return plan
        plan = fewer
