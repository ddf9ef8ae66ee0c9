"""Options that leave groups open -> groupings with their axes, the most promising first.

    speeds ──▶ groupings ──axes that pay──▶ about the least step of each ──▶ in that order

It plans nothing: `GroupTry.plan` does, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bigbrain_fx.core import Axis, Cluster, Graph, TensorParallel
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.judge import by_partitioner
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor.asked import named_axes
from bigbrain_fx.plan.tensor.bounds import Prices
from bigbrain_fx.plan.tensor.choices import alike, step_with
from bigbrain_fx.plan.tensor.groupings import Grouping, groupings
from bigbrain_fx.plan.tensor.make import GroupMaker
from bigbrain_fx.plan.tensor.sequenced import sequenced


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
    named = named_axes(graph, options)
    axes = [axis for axis in named if axis.flops and axis.params]
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
            maker = _maker(graph, cluster, source, options, grouping, divided, named)
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
    named: Sequence[Axis],
) -> Callable[[], Plan]:
    chosen = replace(options, tensor=grouping.members)
    usable = [axis for axis in named if axis.flops and axis.params]

    def make(axes: tuple[Axis, ...]) -> Plan:
        tensor = TensorParallel(grouping.groups, grouping.shares, axes, scatters=True)
        return by_partitioner(GroupMaker(graph, cluster, source, chosen, tensor))

    return lambda: sequenced(_improved(make(axes), make, usable), named, make)


def _improved(plan: Plan, make: Callable[[tuple[Axis, ...]], Plan], usable: Sequence[Axis]) -> Plan:
    """Return the plan, or one that divides other axes while that is faster."""
    while True:
        other_s, axes = min(_others(plan, usable), key=lambda each: each[0], default=(0.0, ()))
        if not axes or other_s >= plan.forecast.step_s:
            return plan
        other = make(axes)
        if other.forecast.step_s >= plan.forecast.step_s:
            return plan
        plan = other


def _others(plan: Plan, usable: Sequence[Axis]) -> Iterator[tuple[float, tuple[Axis, ...]]]:
    """Yield other axes for the same groups, and about the step with them.

    Axes of alike layers go together: without them, with what they met instead, or with them too.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    own, count = tensor.axes, len(tensor.shares)
    found: list[tuple[Axis, ...]] = []
    for same in alike(own).values():
        found.append(tuple(axis for axis in own if axis not in same))
        found.append(chosen_axes([axis for axis in usable if axis not in same], count))
    left = alike(axis for axis in usable if axis not in own).values()
    found.extend(chosen_axes([*own, *same], count) for same in left)
    for axes in dict.fromkeys(found):
        if axes and set(axes) != set(own):
            with suppress(NoPlanError, InputError):
                yield step_with(plan, axes), axes
