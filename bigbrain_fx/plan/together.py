"""Pipelines, replicas and tensor groups -> the fastest plan of any that can be emitted.

    one pipeline ───────────┐
    replicas, each number ──┼──▶ each planned by the partitioner ──▶ the fastest; of equals the
    tensor groups ──────────┤    groups that a bound rules out       simplest
    replicas of such groups ┘    are not planned

`compatibility` says with what groups do not go. Replicas of groups are compared where one of the
two was left open by name, and all replicas' devices are alike: one is planned, and replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Graph, TensorParallel
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.apart import least_gap
from bigbrain_fx.plan.compatibility import Request, Rule, conflict
from bigbrain_fx.plan.divisions import divisions, of_division
from bigbrain_fx.plan.fastest import counted_s, simplest
from bigbrain_fx.plan.judge import Maker
from bigbrain_fx.plan.levels import is_wide, levels, open_numbers
from bigbrain_fx.plan.nouns import AUTO, Options, Plan, Source
from bigbrain_fx.plan.progress import is_stopped, tell, until_stopped
from bigbrain_fx.plan.replicas import (
    OutdoneError,
    divide,
    likeness,
    numbers,
    only,
    replicate,
)
from bigbrain_fx.plan.search import Compared
from bigbrain_fx.plan.tensor import GroupMaker, GroupTry, tensor_is_open, tensor_tries

Make: TypeAlias = Callable[..., Plan]
"""Plan as asked, with nothing left open but what a partitioner chooses: see `make_plan`."""
MOST = 5
"""Groupings that are planned, of those that no bound rules out."""
SMALL, MOST_OF_SMALL = 40, 20
"""Ops of a model that is soon planned, and how many are then."""
NEAR = 1.25
"""Times the best step: replicas that take longer are not planned with ZeRO 1, too, unless they lack
memory; it saves most of an optimizer's time, a twentieth of a step where that was looked at."""
MOST_FAILED = 10
"""Of those that turn out to be no plan."""
MOST_DEVICES = 4096
"""Of all plans together, where each has many devices."""
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
    found = _SoFar(most=MOST if len(graph.ops) > SMALL else MOST_OF_SMALL)
    with until_stopped():
        _plan_all(found, graph, cluster, source, options, make)
    return found.best(least_gap(cluster))


def _plan_all(
    found: _SoFar, graph: Graph, cluster: Cluster, source: Source, options: Options, make: Make
) -> None:
    if is_wide(cluster) and _goes_by_levels(graph, cluster, options):
        _by_levels(found, graph, cluster, source, options, make)
        return
    make = found.against(make)
    alone = replace(options, tensor=1) if tensor_is_open(options) else options
    for one in _numbers(graph, cluster, alone):
        found.add(_said(one), partial(make, graph, cluster, source, one))
        if found.stopped:
            break
        if (one.replicas or 1) > 1 and not one.zero_stage and (found.lacks_memory or found.is_near):
            divided = replace(one, zero_stage=1)
            found.add(_said(divided), partial(make, graph, cluster, source, divided))
    if _groups_are_open(found, options) and not found.stopped:
        _groups(found, graph, cluster, source, options)
    if options.tensor not in (None, 0, 1):  # groups of so many were asked for
        return
    is_small = len(graph.ops) <= SMALL  # of a large one each of these takes seconds
    if is_small and _replicas_are_open(cluster, options) and not found.stopped:
        _divided(found, graph, cluster, source, options, make)


def _divided(
    found: _SoFar, graph: Graph, cluster: Cluster, source: Source, options: Options, make: Make
) -> None:
    """Plan replicas of few devices that are unlike, or otherwise divided among them."""
    groups_go = options.tensor == 0 and not _against_groups(graph, cluster, _for_groups(options))
    members = range(1, len(cluster.devices) // 2 + 1 if groups_go else 2)
    about = graph, cluster, source, options
    found.try_all(
        (str(each), each.least_s, partial(of_division, each, make, *about))
        for each in divisions(*about, members)
    )


def _goes_by_levels(graph: Graph, cluster: Cluster, options: Options) -> bool:
    """Whether numbers of replicas and members are all that is left open."""
    if options.tensor is None and not _replicas_are_open(cluster, options):
        return False
    groups_go = options.tensor in (None, 1) or not _against_groups(graph, cluster, options)
    return groups_go and not (cluster.replicas or options.replica_shares)


def _by_levels(
    found: _SoFar, graph: Graph, cluster: Cluster, source: Source, options: Options, make: Make
) -> None:
    """Plan for many devices what a closed form finds the most promising; one is planned at least.

    That form errs alike for all, so the others are held against its own figure of the first. A plan
    of all of them takes long: as many are made as have `MOST_DEVICES` together.
    """
    tell(f"{len(cluster.devices):,} devices: which replicas and groups are worth a plan")
    left, failed, first_s = MOST_DEVICES, MOST, float("inf")
    for each in levels(graph, cluster, source, options, *open_numbers(cluster, options)):
        what = _said(each.options)
        is_over = found.stopped or (found.fits and left < len(cluster.devices)) or failed == 0
        if is_over or SURE * each.about_s >= first_s:
            room = "" if each.fits else ", and lacks memory"
            found.leave(what, f"takes about {each.about_s:.4g} s{room}, by a closed form")
            continue
        found.add(what, partial(make, graph, cluster, source, each.options))
        if found.lacks_memory and (each.options.replicas or 1) > 1 and not each.options.zero_stage:
            divided = replace(each.options, zero_stage=1)
            found.add(_said(divided), partial(make, graph, cluster, source, divided))
        left -= len(cluster.devices)
        failed -= found.is_failed
        first_s = first_s if found.is_failed else min(first_s, each.about_s)


def _numbers(graph: Graph, cluster: Cluster, options: Options) -> Iterator[Options]:
    """Yield what to plan without groups: as asked, or for every number of replicas."""
    if not _replicas_are_open(cluster, options):
        yield options
        return
    for count in numbers(cluster):
        one = replace(options, replicas=count)
        yield one if count > 1 else _of_one_replica(one)


def _of_one_replica(options: Options) -> Options:
    """Return options without what is for several; the tree is for one, too."""
    if options.all_reduce_order == "tree":
        return replace(options, zero_stage=0)
    return replace(options, zero_stage=0, sum_order="replica")


def _said(options: Options) -> str:
    """Name what is planned."""
    count, zero, members = options.replicas or 1, options.zero_stage, options.tensor or 1
    groups = f"tensor groups of {members} devices" if members > 1 else ""
    if count == 1:
        return groups or "one pipeline"
    return " of ".join(filter(None, (f"{count} replicas", groups))) + (
        f", ZeRO {zero}" if zero else ""
    )


def _for_groups(options: Options) -> Options:
    """Return options with what is open besides at what groups can do."""
    given = replace(options, replicas=None) if options.replicas == 0 else options
    given = _of_one_replica(given) if options.replicas == 0 else given
    return replace(
        given,
        schedule=None if given.schedule == AUTO else given.schedule,
    )


def _groups_are_open(found: _SoFar, options: Options) -> bool:
    """Whether groups were asked for, or hold what nothing else does."""
    return options.tensor == 0 or (tensor_is_open(options) and not found.fits)


def _groups(
    found: _SoFar, graph: Graph, cluster: Cluster, source: Source, options: Options
) -> None:
    """Plan the most promising groups, and replicas of some."""
    one = _for_groups(options)
    rule = _against_groups(graph, cluster, one)
    refused = [rule.other.name] if rule else []
    if options.pins or options.place:
        refused.append("--pin and --place but by --tensor-parallel N")
    if options.objective == "memory":
        refused.append("the objective memory")
    counts = () if refused else _replica_counts(cluster, options)
    if not counts and one.wants_replicas(cluster, trains=graph.training):
        refused.append("shares or devices of replicas")
    elif not counts and one.all_reduce_order != "replica":
        refused.append("--all-reduce-order of one replica")
    if refused:
        found.leave("tensor groups", f"they do not go with {' and '.join(refused)} yet")
        return
    if options.replicas in (None, 0, 1) and one.all_reduce_order == "replica":
        tries = tensor_tries(graph, cluster, source, one, best_s=found.best_s)
        found.try_all((str(each.grouping), each.least_s, each.plan) for each in tries)
    ways = [w for n in counts for w in _replicated(found, n, graph, cluster, source, options)]
    found.try_all(
        (f"{of}{each.grouping}", each.least_s, each.plan)
        for of, each in sorted(ways, key=lambda way: way[1].least_s)
    )


def _against_groups(graph: Graph, cluster: Cluster, options: Options) -> Rule | None:
    """Return the first rule by which groups do not go with what else was asked for."""
    asked = replace(options, tensor=max(2, options.tensor or 0))
    return conflict(Request(asked, cluster, graph))


def _replica_counts(cluster: Cluster, options: Options) -> tuple[int, ...]:
    """Return how many replicas of groups to compare: every number, or the one that is asked for."""
    if _replicas_are_open(cluster, options):
        return tuple(count for count in numbers(cluster) if count > 1)
    given = options.replicas or 1
    is_plain = not options.replica_shares and not cluster.replicas
    return (given,) if given > 1 and is_plain else ()


def _replicated(
    found: _SoFar, count: int, graph: Graph, cluster: Cluster, source: Source, options: Options
) -> Iterator[tuple[str, GroupTry]]:
    """Yield groups of one of so many replicas, each of which makes a plan of all of them."""
    divided = divide(cluster, count)
    if max(map(len, divided)) == 1:
        return
    own = [only(cluster, group) for group in divided]
    micro = options.micro_batches or count
    step = count * (graph.static_batch or 1)
    if len({likeness(each) for each in own}) > 1 or graph.batch % step or micro % count:
        what = f"{count} replicas of tensor groups"
        found.leave(what, "their devices are unlike, or their shares of the batch")
        return
    part = replace(graph, batch=graph.batch // count)
    asked = options.micro_batches and options.micro_batches // count
    one = replace(_of_one_replica(_for_groups(options)), replicas=None, micro_batches=asked)
    for each in tensor_tries(part, own[0], source, one, best_s=found.best_s):
        all_of_them = replace(options, replicas=count, tensor=each.grouping.members)
        make = partial(_all_alike, each, graph, cluster, source, all_of_them, divided)
        yield f"{count} replicas of ", replace(each, make=make)


def _all_alike(
    one: GroupTry,
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    divided: Sequence[tuple[str, ...]],
) -> Plan:
    """Plan one replica, and all of them as it is."""

    def join(tensor: TensorParallel | None) -> Maker:
        assert tensor is not None
        return GroupMaker(graph, cluster, source, options, tensor)

    return replicate(one.plan(), graph, cluster, options, divided, join)


@dataclass
class _SoFar:
    """What was planned so far: mutable, used once.

    Attributes:
        failure: of the first that is no plan.
        lacks_memory: whether the last one did not fit.
        is_failed: whether it is no plan.
        is_outdone: whether it was not planned to its end.
        stopped: whether Ctrl-C was pressed with a plan at hand: nothing more is planned.
        most: of groupings, or of divisions, that are planned.
    """

    plans: list[tuple[str, Plan]] = field(default_factory=list)
    failed: list[Compared] = field(default_factory=list)
    failure: BigBrainError | None = None
    lacks_memory: bool = False
    is_failed: bool = False
    is_outdone: bool = False
    stopped: bool = False
    most: int = MOST

    @property
    def fits(self) -> bool:
        """Whether anything has a plan."""
        return bool(self.plans)

    def try_all(self, ways: Iterable[tuple[str, float, Callable[[], Plan]]]) -> None:
        """Plan the first of these, while one may be faster than the best.

        Each is what it is called, about the least that its step takes, and what plans it.
        """
        made, failed = self.most, MOST_FAILED
        for what, least_s, make in ways:
            if SURE * least_s >= self.best_s:
                self.leave(what, f"takes about {least_s:.4g} s at the least")
            elif made and failed and not self.stopped:
                self.add(what, make)
                made -= not self.is_failed
                failed -= self.is_failed

    def against(self, make: Make) -> Make:
        """Return what plans no replicas to their end that are far from the best so far."""

        def made(*about: object) -> Plan:
            return make(*about, rival_s=self.best_s)

        return made

    @property
    def is_near(self) -> bool:
        """Whether the last one is not much slower than the best: a share of the state may win."""
        last = self.plans[-1:] if not (self.is_failed or self.is_outdone) else []
        return any(plan.forecast.step_s <= NEAR * self.best_s for _, plan in last)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest."""
        return min((counted_s(plan) for _, plan in self.plans), default=float("inf"))

    def add(self, what: str, make: Callable[[], Plan]) -> None:
        """Plan one, or note why there is none."""
        self.lacks_memory = self.is_failed = self.is_outdone = False
        tell(what)
        try:
            plan = make()
            self.plans.append((what, plan))
            self.stopped = is_stopped() or (plan.search is not None and plan.search.stopped)
        except KeyboardInterrupt:
            if not self.plans:
                raise
            self.stopped = True
            self.leave(what, "stopped by Ctrl-C")
        except OutdoneError as error:
            self.is_outdone = True
            self.leave(what, error.what)
        except (NoPlanError, InputError) as error:
            self.lacks_memory, self.is_failed = isinstance(error, NoPlanError), True
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
        others: dict[str, Compared] = {}  # groups of unlike devices may be called alike
        for each in (*self._others(plan), *self.failed):
            if others.setdefault(each.what, each).why != "chosen" and each.why == "chosen":
                others[each.what] = each
        return replace(plan, compared=tuple(others.values()))

    def _others(self, best: Plan) -> Iterator[Compared]:
        every = sorted(self.plans, key=lambda entry: entry[1].forecast.step_s)
        for what, plan in every:
            change = plan.forecast.step_s / best.forecast.step_s - 1
            why = (
                f"{change:+.1%}" if change >= 0 else f"{change:+.1%}: too near to say, less simple"
            )
            yield Compared(what, plan.forecast.step_s, "chosen" if plan is best else why)
