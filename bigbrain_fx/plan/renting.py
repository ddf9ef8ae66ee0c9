"""Options with limits, or the objective cost -> a plan on the devices that are worth their price.

    sets of devices ──by a closed form──▶ the most promising first ──▶ a plan of each, until none
                                                                       can be better

All devices are planned in any case, for the shortest step: what the others would add can then be
said. A set is left out where even devices that never wait would take too long there, or cost too
much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.fastest import least_gap, tell
from bigbrain_fx.plan.nouns import Case, Plan
from bigbrain_fx.plan.prices import (
    HOUR_S,
    best_for,
    excesses,
    money,
    no_plan_within,
    require_countable,
    step_usd,
)
from bigbrain_fx.plan.replicas import only
from bigbrain_fx.plan.search import Objective
from bigbrain_fx.plan.search.nouns import Goals, Offer
from bigbrain_fx.plan.strategy import Bound
from bigbrain_fx.plan.strategy.space import Names, device_choices

PlanOn: TypeAlias = Callable[[Case], Plan]
MOST_PLANS = 12
"""Sets of devices that are planned on; of many devices fewer, by `WORK`."""
WORK = 400_000
"""Ops times devices that all these plans may have; one set besides all devices is planned on."""
MOST_OFFERS = 8


def plan_rented(case: Case, make: PlanOn) -> Plan:
    """Choose devices, plan on them, and note what others would take and cost.

    Raises:
        NoPlanError: nothing fits, or no plan keeps to the limits; the nearest, and by how much.
        InputError: a price or a number of tokens is missing, or what was asked for cannot be.
    """
    require_countable(case.cluster, case.options)
    renter = _Renter(case, make)
    renter.run()
    return renter.best()


@dataclass
class _Renter:
    """Plans so far: mutable, used once."""

    case: Case
    make: PlanOn
    plans: dict[tuple[Names, Objective], Plan] = field(default_factory=dict)
    failures: dict[Names, BigBrainError] = field(default_factory=dict)
    left: int = WORK

    def run(self) -> None:
        """Plan on all devices, and on the sets that may be better."""
        every = max(self._choices, key=len)
        self._plan(every, "throughput" if self._for_money else self.case.options.objective)
        self._plan_some(sorted(self._choices, key=self._promise))
        if not self._within and self.goals.needs_prices:  # the cheapest there is, to be named
            self._plan_some(sorted(self._choices, key=self._least_usd))

    def _plan_some(self, ranked: Sequence[Names]) -> None:
        for names in ranked:
            if len(self.plans) + len(self.failures) >= MOST_PLANS or self.left <= 0:
                return
            is_known = names in self.failures or (names, self.case.options.objective) in self.plans
            if not is_known and self._may_be_best(names):
                self._plan(names, self.case.options.objective)

    def best(self) -> Plan:
        """Return the best plan within the limits, with what was compared."""
        if not self.plans:
            raise next(iter(self.failures.values()))
        within = self._within
        if not within:
            raise no_plan_within(self.goals, list(self.plans.values()))
        plan = best_for(self.case.options.objective, within, least_gap(self.case.cluster))
        return replace(plan, cluster=self.case.cluster, rented=self._offers(plan))

    @cached_property
    def goals(self) -> Goals:
        """The limits; none, where only the objective was asked for."""
        return self.case.options.goals or Goals()

    @property
    def _within(self) -> list[Plan]:
        return [plan for plan in self.plans.values() if not excesses(plan, self.goals)]

    @property
    def _for_money(self) -> bool:
        return self.case.options.objective == "cost"

    # ------------------------------------------------------------------ what is planned

    @cached_property
    def _choices(self) -> list[Names]:
        """Sets of devices; all only, where devices are named by hand."""
        if self.case.options.place or self.case.options.pins:
            return [tuple(self.case.cluster.device)]
        return device_choices(self.case.cluster)

    @cached_property
    def _speeds(self) -> dict[str, float]:
        return dict(Bound(self.case).speeds())

    def _least_s(self, names: Names) -> float:
        """Return the seconds of a step of devices that never wait."""
        return 1 / sum(self._speeds[name] for name in names)

    def _least_usd(self, names: Names) -> float:
        prices = self.case.cluster.price
        return self._least_s(names) * sum(prices.get(name, 0.0) for name in names) / HOUR_S

    def _promise(self, names: Names) -> tuple[float, ...]:
        """Return what is least for the set that is planned on first."""
        least_s = self._least_s(names)
        return (self._least_usd(names), least_s) if self._for_money else (least_s, len(names))

    def _may_be_best(self, names: Names) -> bool:
        """Whether devices that never wait would keep to the limits, and beat what is known."""
        within = self._within
        if not within:
            return True
        if self._for_money:
            return self._least_usd(names) < min(map(step_usd, within))
        return self._least_s(names) < min(plan.forecast.step_s for plan in within)

    def _plan(self, names: Names, objective: Objective) -> None:
        tell(f"{len(names)} of {len(self.case.cluster.devices)} devices")
        self.left -= len(self.case.graph.ops) * len(names)
        is_all = len(names) == len(self.case.cluster.devices)
        part = self.case.cluster if is_all else only(self.case.cluster, names)
        try:
            plan = self.make(replace(self.case, cluster=part).asking(objective=objective))
        except (NoPlanError, InputError) as error:
            self.failures[names] = error
        else:
            self.plans[names, objective] = replace(plan, cluster=self.case.cluster)

    # ------------------------------------------------------------------ what was compared

    def _offers(self, best: Plan) -> tuple[Offer, ...]:
        """Return the plan that was chosen, then that on all devices, then the others."""
        order = (best, *(plan for plan in self.plans.values() if plan is not best))
        offers: dict[Names, Offer] = {}
        for plan in order:
            why = "; ".join(each.text for each in excesses(plan, self.goals))
            usd = None if money(plan) is None else step_usd(plan)
            offer = Offer(plan.stages.devices, plan.forecast.step_s, usd, why)
            offers.setdefault(tuple(sorted(offer.devices)), offer)
        refused = [Offer(names, why=error.what) for names, error in self.failures.items()]
        return (*offers.values(), *refused)[:MOST_OFFERS]
