"""Strategies -> the fastest plan of any: the most promising first, until no other can be faster.

    space ──priced──▶ by about how long ──▶ a plan of each, but of those that
                                            a bound rules out, or that are beyond the budget

A strategy whose bound is not below the best step by more than forecasts can tell apart is left out.
Of the plans that were made, the simplest of those that are too near to tell is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.compatibility import Request, Rule, conflict
from bigbrain_fx.plan.fastest import counted_s, is_stopped, least_gap, tell, until_stopped
from bigbrain_fx.plan.nouns import AUTO, Case, Options, Plan
from bigbrain_fx.plan.prices import best_for, charges_for_bytes
from bigbrain_fx.plan.replicas import divide, halved
from bigbrain_fx.plan.search import Compared
from bigbrain_fx.plan.strategy.partitions import FEW, SetPrices, has_partitions, partitions
from bigbrain_fx.plan.strategy.space import (
    are_alike,
    fastest_number,
    grouped,
    micro_batches_are_open,
    replica_counts,
    replicas_are_open,
    undivided,
    with_micro_batches,
)
from bigbrain_fx.plan.strategy.strategy import Bound, Priced, Strategy
from bigbrain_fx.plan.tensor import tensor_is_open

PlanOne: TypeAlias = Callable[[Case], Plan]
"""Plan with nothing left open but what a partitioner chooses: see `make_plan`."""
BUDGET, OF_EACH = 100_000, 4_000
"""What strategies may cost to plan: each its ops times its devices, and so much besides; one is
planned at least. A plan of 700 ops takes 16 devices about a second."""
IN_VAIN = 3
"""Partitions of the devices that are planned in a row though none is faster than the best."""
SINGLE = 0.8
"""Times what it takes by a closed form that a partition of single devices counts: it takes a tenth
of the time to plan."""
SMALL, FAR = 10_000, 1.1
"""What every strategy may cost, and times the best step that others may take by a closed form."""


def is_open(case: Case) -> bool:
    """Whether the number of replicas is left open, of ranks of groups, or replicas' rows."""
    if tensor_is_open(case.options) or replicas_are_open(case.cluster, case.options):
        return True
    return micro_batches_are_open(case)


def plan_strategies(case: Case, make: PlanOne) -> Plan:
    """Plan everything that was left open, and return the fastest.

    Raises:
        NoPlanError: nothing fits in memory; the arithmetic of the simplest.
        InputError: what was asked for cannot be.
    """
    chooser = _Chooser(case, make)
    with until_stopped():
        chooser.run()
    return chooser.best()


@dataclass
class _Chooser:
    """Plans so far: mutable, used once.

    Attributes:
        failures: of strategies that have no plan.
        left: of the budget.
        stopped: whether Ctrl-C was pressed with a plan at hand: nothing more is planned.
    """

    case: Case
    make: PlanOne
    plans: list[tuple[Strategy, Plan]] = field(default_factory=list)
    failures: list[tuple[Strategy, BigBrainError]] = field(default_factory=list)
    unplanned: list[Compared] = field(default_factory=list)
    left: int = BUDGET
    stopped: bool = False

    def run(self) -> None:
        """Plan what is worth it."""
        self._plan(undivided(self.case.cluster, self.case.options))
        self.left = BUDGET  # else replicas of unlike sizes are planned in place of better ones
        self._plan_partitions()
        is_asked = self.case.options.tensor == 0
        is_last = tensor_is_open(self.case.options) and not self.plans
        if (is_asked or is_last) and not self.stopped:
            self._plan(self._groups())

    def best(self) -> Plan:
        """Return the fastest, with what it was compared with."""
        if not self.plans:
            raise min(self.failures, key=lambda each: (each[0].members, each[0].replicas))[1]
        plans = [plan for _, plan in self.plans]
        plan = best_for(self.case.options.objective, plans, self._gap)
        others: dict[str, Compared] = {}  # groups of unlike devices may be called alike
        for each in (*self._others(plan), *self._failed(), *self.unplanned):
            if others.setdefault(each.what, each).why != "chosen" and each.why == "chosen":
                others[each.what] = each
        return replace(plan, compared=tuple(others.values()))

    def _others(self, best: Plan) -> Iterator[Compared]:
        for strategy, plan in sorted(self.plans, key=lambda each: each[1].forecast.step_s):
            change = plan.forecast.step_s / best.forecast.step_s - 1
            near = "" if change >= 0 else ": too near to say, less simple"
            why = "chosen" if plan is best else f"{change:+.1%}{near}"
            yield Compared(str(strategy), plan.forecast.step_s, why)

    def _failed(self) -> Iterator[Compared]:
        return (Compared(str(each), None, error.what) for each, error in self.failures)

    # ------------------------------------------------------------------ what there is

    def _groups(self) -> Iterator[Strategy]:
        """Yield tensor groups, and replicas of some, or note why there are none."""
        counts = replica_counts(self.case.cluster, self.case.options)
        refused = self._refused(counts)
        if refused:
            why = f"they do not go with {' and '.join(refused)} yet"
            self._leave("tensor groups", why)
            return
        is_alone = self.case.options.replicas in (None, 0, 1)
        of_one = is_alone and self._given.all_reduce_order == "replica"
        for count in (*([1] if of_one else []), *counts):
            if count == 1 or are_alike(self.case, count):
                yield from grouped(self.case.cluster, self.case.options, self._bound, count)
            else:
                what = f"{count} replicas of tensor groups"
                self._leave(what, "their devices are unlike, or their shares of the batch")

    @cached_property
    def _given(self) -> Options:
        """Return the other requested options, without replicas' options where replicas are open."""
        options = self.case.options
        schedule = None if options.schedule == AUTO else options.schedule
        if options.replicas != 0:
            return replace(options, schedule=schedule)
        order = None if options.all_reduce_order == "tree" else "replica"
        given = replace(options, replicas=None, zero_stage=0, shard_group=None, schedule=schedule)
        return given if order is None else replace(given, sum_order="replica")

    @cached_property
    def _against_groups(self) -> Rule | None:
        """The first rule by which groups do not go with what else was asked for."""
        asked = replace(self._given, tensor=max(2, self.case.options.tensor or 0))
        return conflict(Request(asked, self.case.cluster, self.case.graph))

    def _refused(self, counts: tuple[int, ...]) -> list[str]:
        one, rule = self._given, self._against_groups
        refused = [rule.other.name] if rule else []
        if self.case.options.pins or self.case.options.place:
            refused.append("--pin and --place but by --tensor-parallel N")
        if self.case.options.objective == "memory":
            refused.append("the objective memory")
        if refused or counts:
            return refused
        if replace(self.case, options=one).wants_replicas:
            return ["shares or devices of replicas"]
        return ["--all-reduce-order of one replica"] if one.all_reduce_order != "replica" else []

    # ------------------------------------------------------------------ what is planned

    def _plan(self, strategies: Iterable[Strategy]) -> None:
        every = list(strategies)
        is_only = len(every) == 1 and not self.plans
        priced = map(_only if is_only else self._bound.of, every)
        for each in self._promising(list(priced)):
            if not self.stopped and not self._is_left_out(each):
                self._plan_one(each.strategy)
                self._plan_beside(each.strategy)

    def _plan_partitions(self) -> None:
        """Plan replicas of any sets of devices, the fastest by a closed form first.

        None that takes as long as the best plan, and none after some in a row that are no faster.
        """
        if not has_partitions(self.case.cluster, self.case.options):
            return
        in_vain = 0
        for about_s, strategy in self._partitions(self._most_s()):
            best_s = self._best_s
            if self.stopped or in_vain == IN_VAIN or about_s >= best_s:
                return
            if self._is_worth_it(replace(self._bound.of(strategy), about_s=about_s)):
                self._plan_one(strategy)
                self._plan_beside(strategy)
                in_vain = 0 if self._best_s < best_s else in_vain + (not _is_quick(strategy))

    def _partitions(self, most_s: float) -> list[tuple[float, Strategy]]:
        """Return replicas on sets of devices that take less, the fastest first."""
        cluster, zero = self.case.cluster, self.case.options.zero_stage
        known = [each.sets or divide(cluster, each.replicas) for each in self._planned()]
        every = (Strategy(len(own), 1, zero, own) for own in partitions(cluster, known))
        priced = ((self._counted(each, most_s), each) for each in every)
        return sorted((each for each in priced if each[0] < most_s), key=lambda each: each[0])

    def _counted(self, strategy: Strategy, most_s: float) -> float:
        """Return about the seconds of a partition; fewer, where it is planned quickly."""
        times = SINGLE if _is_quick(strategy) else 1.0
        return times * self._set_prices.about_s(strategy, most_s / times)

    def _is_worth_it(self, each: Priced) -> bool:
        """Whether a partition is planned; those that are not are too many to be listed."""
        if each.lacks or self.left <= 0 or self._is_far(each):
            return False
        if self.plans and not each.fits:
            return False
        return self._pays_for_bytes or self._may_be_faster(each.least_s)

    def _planned(self) -> Iterator[Strategy]:
        """Yield strategies that were planned, with a plan or without one."""
        yield from (strategy for strategy, _ in (*self.plans, *self.failures))

    def _most_s(self) -> float:
        """Return what partitions may take by the closed form.

        Of few devices less than the best plan does, of many less than that does by the form.
        """
        if not self.plans or len(self.case.cluster.devices) <= FEW:
            return self._best_s
        best, _ = min(self.plans, key=lambda each: counted_s(each[1]))
        return min(self._best_s, self._set_prices.about_s(best))

    @cached_property
    def _set_prices(self) -> SetPrices:
        return SetPrices(self._bound, self.case.cluster)

    @property
    def _best_s(self) -> float:
        return min((counted_s(plan) for _, plan in self.plans), default=float("inf"))

    def _promising(self, priced: Sequence[Priced]) -> list[Priced]:
        """Return what fits, then what does not, each by about how long it takes."""
        return sorted(priced, key=lambda each: (not each.fits, each.about_s))

    def _plan_beside(self, strategy: Strategy) -> None:
        """Plan what is worth a look by what became of one, until there is a plan."""
        for other in self._beside(strategy):
            if self.stopped or self._plan_one(other):
                return

    def _is_left_out(self, each: Priced) -> bool:
        """Whether it is not planned, and say why."""
        if not self.plans:
            return False
        what, room = str(each.strategy), "" if each.fits else ", and lacks memory"
        if each.lacks:
            self._leave(what, "lacks memory for its state and one micro-batch, by a bound")
        elif not (self._pays_for_bytes or self._may_be_faster(each.least_s)):
            self._leave(what, f"takes {each.least_s:.4g} s at the least")
        elif self.left <= 0 or self._is_far(each):
            self._leave(what, f"takes about {each.about_s:.4g} s{room}, by a closed form")
        else:
            return False
        return True

    def _is_far(self, each: Priced) -> bool:
        """Whether what is dear to plan takes much longer than the best, by the closed form."""
        return self._cost(each.strategy) > SMALL and each.about_s > FAR * self._best_s

    def _cost(self, strategy: Strategy) -> int:
        """Return what a strategy costs to plan: longer pipelines more, as orders are searched."""
        devices = len(self.case.cluster.devices)
        long = devices // (strategy.replicas * strategy.members)
        return OF_EACH + len(self.case.graph.ops) * devices * (8 + long) // 8

    def _may_be_faster(self, least_s: float) -> bool:
        """Whether a step of so many seconds is faster than the best by more than can be told."""
        return least_s * (1 + self._gap) < self._best_s

    def _beside(self, strategy: Strategy) -> Iterator[Strategy]:
        """Yield what has more room than one without a plan, or may be faster than one with it."""
        failed = self.failures[-1] if self.failures else None
        if failed is not None and failed[0] is strategy:
            if isinstance(failed[1], NoPlanError) and strategy.replicas > 1:
                yield from () if strategy.zero_stage else [replace(strategy, zero_stage=1)]
            return
        if strategy.replicas == 1 or strategy.zero_stage or strategy.members > 1:
            return
        last = self.plans[-1][1]
        saved_s = self._bound.update_s() * (1 - 1 / strategy.replicas)
        makes_again = last.stages.recompute or last.stages.again
        if makes_again or self._may_be_faster(last.forecast.step_s - saved_s):
            yield replace(strategy, zero_stage=1)

    def _plan_one(self, strategy: Strategy) -> bool:
        """Plan one, or note why there is none; whether there is one."""
        tell(str(strategy))
        self.left -= self._cost(strategy)
        try:
            plan = self._made(strategy)
            self.plans.append((strategy, replace(plan, cluster=self.case.cluster)))
            self.stopped = is_stopped() or (plan.search is not None and plan.search.stopped)
            return True
        except KeyboardInterrupt:
            if not self.plans:
                raise
            self.stopped = True
            self._leave(str(strategy), "stopped by Ctrl-C")
        except (NoPlanError, InputError) as error:
            self.failures.append((strategy, error))
        return False

    def _made(self, strategy: Strategy) -> Plan:
        """Plan one; of replicas with the best number of micro-batches where that is open."""
        where, asked = strategy.on(self.case.cluster), strategy.asked(self.case.options)
        case = replace(self.case, cluster=where, options=asked)
        if not micro_batches_are_open(case):
            return self.make(case)

        def make(given: Options, number: int | None) -> Plan:
            return self.make(replace(case, options=given).asking(micro_batches=number))

        # whole backwards for each number, split ones for the best alone
        whole = asked if asked.defer is not None else replace(asked, defer=())
        each = [*map(self._bound.of, with_micro_batches(strategy, case))]
        best = fastest_number(each, partial(make, whole), self._may_be_faster)
        return halved(best, case, make)

    def _leave(self, what: str, why: str) -> None:
        self.unplanned.append(Compared(what, None, why))

    @cached_property
    def _bound(self) -> Bound:
        return Bound(self.case)

    @cached_property
    def _pays_for_bytes(self) -> bool:
        """Whether a slower plan may be the better one."""
        return self.case.options.objective == "cost" and charges_for_bytes(self.case.cluster)

    @cached_property
    def _gap(self) -> float:
        return least_gap(self.case.cluster)


def _is_quick(strategy: Strategy) -> bool:
    """Whether replicas are of one device each, for which no cuts are searched."""
    return max(map(len, strategy.sets)) == 1


def _only(strategy: Strategy) -> Priced:
    """Return the only strategy as it is: nothing else is compared with it."""
    return Priced(strategy, 0.0, 0.0, fits=True)
