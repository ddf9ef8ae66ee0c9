"""Pipelines, replicas and tensor groups -> the fastest plan of any that can be emitted.

    one pipeline ──────────┐
    replicas, each number ─┼──▶ each planned by the partitioner ──▶ the fastest; of equals the
    tensor groups ─────────┘    groups that a bound rules out       simplest
                                are not planned

A group's exchanges are between pipelines' stages today: groups do not go with replicas, ZeRO or
recompute (`tensor.not_yet` says with what), so these are compared, and not multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.apart import apart
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
from bigbrain_fx.plan.replicas import numbers, require_sensible, wants_replicas
from bigbrain_fx.plan.search import Compared
from bigbrain_fx.plan.tensor import not_yet, tensor_is_open, tensor_tries

Make: TypeAlias = Callable[[Graph, Cluster, Source, Options], Plan]
"""Plan as asked, with nothing left open but what a partitioner chooses."""
MOST = 5
"""Groupings that are planned, of those that no bound rules out."""
SURE = 0.95
"""Of a grouping's least step, which is about right: what so reaches the best is left out."""


def is_open(cluster: Cluster, options: Options) -> bool:
    """Whether the number of replicas, or of members of tensor groups, is left open."""
    return tensor_is_open(options) or _replicas_are_open(cluster, options)


def _replicas_are_open(cluster: Cluster, options: Options) -> bool:
    return options.replicas == 0 and not (options.replica_shares or cluster.replicas)


def plan_together(
    graph: Graph, cluster: Cluster, source: Source, options: Options, make: Make
) -> Plan:
    """Plan everything that was left open, and return the fastest.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic of a pipeline.
        InputError: what was asked for cannot be.
    """
    found = _SoFar()
    alone = replace(options, tensor=1) if tensor_is_open(options) else options
    for one in _numbers(graph, cluster, alone):
        found.add(_said(one), partial(make, graph, cluster, source, one))
        if found.stopped:
            break
        if found.lacks_memory and (one.replicas or 1) > 1 and not one.zero_stage:
            divided = replace(one, zero_stage=1)
            found.add(_said(divided), partial(make, graph, cluster, source, divided))
    if tensor_is_open(options) and not found.stopped:
        _groups(found, graph, cluster, source, _for_groups(options))
    return found.best(apart(cluster))


def _numbers(graph: Graph, cluster: Cluster, options: Options) -> Iterator[Options]:
    """Yield what to plan without groups: as asked, or for every number of replicas."""
    if not _replicas_are_open(cluster, options):
        yield options
        return
    require_sensible(graph, options)
    for count in numbers(cluster):
        one = replace(options, replicas=count)
        yield one if count > 1 else _of_one_replica(one)


def _of_one_replica(options: Options) -> Options:
    """Return options without what is for several; the tree is for one, too."""
    if options.sum_order == "tree":
        return replace(options, zero_stage=0)
    return replace(options, zero_stage=0, sum_order="replica")


def _said(options: Options) -> str:
    """Name what is planned."""
    count, zero = options.replicas or 1, options.zero_stage
    if count == 1:
        return "one pipeline"
    return f"{count} replicas" + (f", ZeRO {zero}" if zero else "")


def _for_groups(options: Options) -> Options:
    """Return options with what is open besides at what groups can do."""
    given = replace(options, replicas=None) if options.replicas == 0 else options
    given = _of_one_replica(given) if options.replicas == 0 else given
    return replace(
        given,
        recompute=None if given.recompute == "auto" else given.recompute,
        schedule=None if given.schedule == AUTO else given.schedule,
    )


def _groups(
    found: _SoFar, graph: Graph, cluster: Cluster, source: Source, options: Options
) -> None:
    """Plan the most promising groups, while one may be faster than the best."""
    refused = [what for what, _ in not_yet(graph, cluster, source, options)]
    if wants_replicas(graph, cluster, options):
        refused.append("replicas whose number is given")
    if options.objective == "memory":
        refused.append("the objective memory")
    if refused:
        found.leave("tensor groups", f"they do not go with {' and '.join(refused)} yet")
        return
    planned = 0
    for each in tensor_tries(graph, cluster, source, options, fits=bool(found.plans)):
        if SURE * each.least_s >= found.best_s:
            found.leave(str(each.grouping), f"takes about {each.least_s:.4g} s at the least")
        elif planned < MOST and not found.stopped:
            planned += 1
            found.add(str(each.grouping), each.plan)


@dataclass
class _SoFar:
    """What was planned so far: mutable, used once.

    Attributes:
        failure: of the first that is no plan.
        lacks_memory: whether the last one did not fit.
        stopped: whether Ctrl-C was pressed with a plan at hand: nothing more is planned.
    """

    plans: list[tuple[str, Plan]] = field(default_factory=list)
    failed: list[Compared] = field(default_factory=list)
    failure: BigBrainError | None = None
    lacks_memory: bool = False
    stopped: bool = False

    @property
    def best_s(self) -> float:
        """Seconds of the fastest."""
        return min((plan.forecast.step_s for _, plan in self.plans), default=float("inf"))

    def add(self, what: str, make: Callable[[], Plan]) -> None:
        """Plan one, or note why there is none."""
        self.lacks_memory = False
        try:
            plan = make()
            self.plans.append((what, plan))
            self.stopped = plan.search is not None and plan.search.stopped
        except KeyboardInterrupt:
            if not self.plans:
                raise
            self.stopped = True
            self.leave(what, "stopped by Ctrl-C")
        except (NoPlanError, InputError) as error:
            self.lacks_memory = isinstance(error, NoPlanError)
            self.failure = self.failure or error
            self.failed.append(Compared(what, None, error.what))

    def leave(self, what: str, why: str) -> None:
        """Note what is not planned."""
        self.failed.append(Compared(what, None, why))

    def best(self, near: float) -> Plan:
        """Return the fastest, with what it was compared with."""
        if not self.plans:
            assert self.failure is not None
            raise self.failure
        plan = simplest([plan for _, plan in self.plans], near)
        return replace(plan, compared=(*self._others(plan), *self.failed))

    def _others(self, best: Plan) -> Iterator[Compared]:
        every = sorted(self.plans, key=lambda entry: entry[1].forecast.step_s)
        for what, plan in every:
            change = plan.forecast.step_s / best.forecast.step_s - 1
            why = (
                f"{change:+.1%}" if change >= 0 else f"{change:+.1%}: too near to say, less simple"
            )
            yield Compared(what, plan.forecast.step_s, "chosen" if plan is best else why)
