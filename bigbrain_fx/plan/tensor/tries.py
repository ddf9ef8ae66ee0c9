"""Options that leave groups open -> groupings with their axes, the most promising first.

    speeds ──▶ groupings ──axes that pay──▶ about the least step of each ──▶ in that order

It plans nothing: `GroupTry.plan` does, where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from bigbrain_fx.core import Axis, Cluster, Graph, TensorParallel
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import first
from bigbrain_fx.plan.judge import by_partitioner
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor.asked import named_axes
from bigbrain_fx.plan.tensor.bounds import Prices
from bigbrain_fx.plan.tensor.choices import step_with
from bigbrain_fx.plan.tensor.groupings import Grouping, groupings, shares_of
from bigbrain_fx.plan.tensor.least_room import require_room
from bigbrain_fx.plan.tensor.make import GroupMaker
from bigbrain_fx.plan.tensor.sequenced import sequenced
from bigbrain_fx.plan.tensor.weighed import OPS, Divided, Weigher, other_axes, other_shares

FAR = 0.6
"""Of what a grouping's axes and exchanges add up to one by one: neighbours need fewer exchanges, so
its step may take less. What is slower even so is not looked at more closely, unless there are so
many looks for each grouping."""
MANY_LOOKS = 10
SMALL = 40
"""Ops of a graph of which a plan is simulated in other shares, too."""


@dataclass(frozen=True)
class GroupTry:
    """One grouping that may be planned.

    Attributes:
        least_s: about the least that its step can take.
        about_s: of a chain of its groups.
    """

    grouping: Grouping
    least_s: float
    about_s: float
    make: Callable[[], Plan]

    def plan(self) -> Plan:
        """Plan it, by the partitioner that was asked for.

        Raises:
            NoPlanError: it does not fit in memory.
        """
        return self.make()


def tensor_tries(
    graph: Graph, cluster: Cluster, source: Source, options: Options, *, best_s: float
) -> tuple[GroupTry, ...]:
    """Return what may be planned, the most promising first.

    Args:
        graph: as captured.
        cluster: all devices.
        source: what the model file says besides.
        options: whose axes, where they are named, are all that is divided.
        best_s: of what has a plan; infinite where nothing fits: then all is divided that can be.
    """
    named = named_axes(graph, options)
    axes = [axis for axis in named if axis.flops and axis.params]
    if not axes:
        return ()
    rows = graph.static_batch or graph.batch
    costs = estimated(graph.at(rows), cluster, source, options.estimator)
    prices = Prices(costs.alone or costs, cluster, graph.batch // rows)
    every = groupings(cluster, prices.speeds(), max(axis.size for axis in axes))
    fits = best_s < float("inf")
    priced = [_priced(axes, grouping, prices, fits=fits) for grouping in every]
    priced = sorted((each for each in priced if each.axes), key=lambda each: each.least_s)
    weigher = Weigher(graph, cluster, source, options, axes, _looks(graph, options))
    far_share = 0.0 if weigher.left > MANY_LOOKS * len(priced) else FAR
    near = _weighed(weigher, [each for each in priced if far_share * each.least_s < best_s])
    far = [each for each in priced if far_share * each.least_s >= best_s]
    about = graph, cluster, source, options
    tries = (
        GroupTry(e.grouping, e.least_s, e.about_s, _maker(*about, e, axes, named))
        for e in (*near, *far)
    )
    return tuple(sorted(tries, key=lambda each: each.about_s))


def _priced(axes: Sequence[Axis], grouping: Grouping, prices: Prices, *, fits: bool) -> Divided:
    chosen = chosen_axes(axes, grouping.members)
    divided = prices.paying(chosen, grouping) if fits else chosen
    least_s = prices.least_s(divided, grouping)
    return Divided(grouping, divided, least_s, least_s)


def _looks(graph: Graph, options: Options) -> int:
    return OPS[options.effort] // max(1, len(graph.ops))


def _weighed(weigher: Weigher, near: Sequence[Divided]) -> list[Divided]:
    """Return these as plans add them up, some with other axes, shares and members' places."""
    found = []
    for number, each in enumerate(near):
        all_axes = chosen_axes(weigher.usable, each.grouping.members)
        most = weigher.left // (len(near) - number)
        found.append(weigher.best(each.grouping, (each.axes, all_axes), most))
    return found


def _maker(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    divided: Divided,
    usable: Sequence[Axis],
    named: Sequence[Axis],
) -> Callable[[], Plan]:
    chosen = replace(options, tensor=divided.grouping.members)

    def make(tensor: TensorParallel) -> Plan:
        if not options.offload:
            require_room(graph, cluster, source, tensor)
        return by_partitioner(GroupMaker(graph, cluster, source, chosen, tensor))

    def of_axes(axes: tuple[Axis, ...]) -> Plan:
        return make(replace(divided.tensor(), axes=axes))

    def made() -> Plan:
        try:
            plan = make(divided.tensor())
        except NoPlanError:
            tries = _smaller(divided, usable, is_small=len(graph.ops) <= SMALL)
            if not tries:
                raise
            plan = first([partial(make, each) for each in tries], but=(NoPlanError,))
        return sequenced(_improved(plan, make, usable), named, of_axes)

    return made


def _smaller(divided: Divided, usable: Sequence[Axis], *, is_small: bool) -> list[TensorParallel]:
    """Return groups that may need less memory: all divided that can be, in shares more alike.

    Of a small graph with other axes, too.
    """
    tensor = divided.tensor()
    every = [chosen_axes(usable, tensor.members)]
    if is_small:
        every += other_axes(every[0], usable, tensor.members)
    shares = [_between(tensor.shares, part) for part in (1.0, 0.75, 0.5, 0.25, 0.0)]
    tries = (
        replace(tensor, axes=axes, shares=each) for axes in every for each in dict.fromkeys(shares)
    )
    return [each for each in tries if each != tensor]


def _between(shares: tuple[int, ...], part: float) -> tuple[int, ...]:
    """Return shares that are so near to these, and else equal."""
    whole, count = sum(shares), len(shares)
    return shares_of([part * share / whole + (1 - part) / count for share in shares])


def _improved(plan: Plan, make: Callable[[TensorParallel], Plan], usable: Sequence[Axis]) -> Plan:
    """Return the plan, or one that divides other axes, or otherwise, while that is faster."""
    while True:
        other_s, tensor = min(_others(plan, usable), key=lambda each: each[0], default=(0.0, None))
        if tensor is None or other_s >= plan.forecast.step_s:
            return plan
        other = make(tensor)
        if other.forecast.step_s >= plan.forecast.step_s:
            return plan
        plan = other


def _others(plan: Plan, usable: Sequence[Axis]) -> Iterator[tuple[float, TensorParallel]]:
    """Yield what else the same groups could divide, and about the step with it.

    Of a small graph in other shares, too: where memory is scarce they are not those of speeds.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    every = [replace(tensor, axes=axes) for axes in other_axes(tensor.axes, usable, tensor.members)]
    if len(plan.graph.ops) <= SMALL:
        every += [replace(tensor, shares=shares) for shares in other_shares(tensor.shares)]
    for other in every:
        with suppress(NoPlanError, InputError):
            yield step_with(plan, other.axes, other.shares), other
