"""Limits of money and time: whether a plan keeps to them, by how much it does not, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.goals import Goals
from bigbrain_fx.plan.money import HOUR_S, Money, money, per_step, steps_for, unit
from bigbrain_fx.plan.nouns import Options, Plan

_DIGITS = 4


@dataclass(frozen=True)
class Excess:
    """A limit that a plan does not keep to.

    Attributes:
        flag: the option that limits it.
        value: what the plan has, in the unit of the option.
        limit: what was asked for.
        least: whether the limit is a least value, not a most.
        form: how a value is written for the option.
    """

    flag: str
    value: float
    limit: float
    least: bool
    form: str

    @property
    def by(self) -> float:
        """The share by which it is beyond: 0.05 is 5 %."""
        far, near = (self.limit, self.value) if self.least else (self.value, self.limit)
        return far / near - 1 if near else float("inf")

    @property
    def text(self) -> str:
        """Name the value, the limit and the difference."""
        beyond = "below" if self.least else "over"
        value, limit = (self.form.format(f"{each:.4g}") for each in (self.value, self.limit))
        far = f"{self.by + 1:.3g} times" if self.by > 1 else f"{100 * self.by:.3g} %"
        return f"{value} is {far} {beyond} {self.flag} {limit}"

    @property
    def remedy(self) -> str:
        """Return the option with a limit that the plan keeps to."""
        return f"{self.flag} {self.form.format(_rounded(self.value, up=not self.least))}"


def _rounded(value: float, *, up: bool) -> str:
    """Return a number of few digits that is not below a value, or not above it."""
    power = _DIGITS - 1 - floor(log10(value)) if value else 0
    whole = (ceil if up else floor)(value * 10.0**power)
    return f"{whole / 10.0**power:.12g}"


def excesses(plan: Plan, goals: Goals) -> list[Excess]:
    """Return the limits that a plan does not keep to."""
    every = (*_of_money(money(plan), plan, goals), *_of_time(plan, goals))
    return [each for each in every if (each.value < each.limit) == each.least and each.by > 0]


def _of_money(paid: Money | None, plan: Plan, goals: Goals) -> Iterator[Excess]:
    if paid is None:
        return
    if goals.max_usd is not None and goals.tokens is not None:
        usd = steps_for(plan.graph, goals.tokens) * paid.step_usd
        yield Excess("--max-cost", usd, goals.max_usd, least=False, form="{}")
    if goals.max_hour_usd is not None:
        yield Excess("--max-cost", paid.spent_hour_usd, goals.max_hour_usd, False, "{}/h")


def _of_time(plan: Plan, goals: Goals) -> Iterator[Excess]:
    step_s = plan.forecast.step_s
    if goals.min_per_s is not None:
        per_s = per_step(plan.graph) / step_s
        yield Excess("--min-throughput", per_s, goals.min_per_s, least=True, form="{}")
    if goals.deadline_s is not None and goals.tokens is not None:
        hours = steps_for(plan.graph, goals.tokens) * step_s / HOUR_S
        yield Excess("--deadline", hours, goals.deadline_s / HOUR_S, least=False, form="{}h")


def no_plan_within(goals: Goals, plans: Sequence[Plan]) -> NoPlanError:
    """Build the error where no plan keeps to all limits: the plan that is nearest to it.

    Args:
        goals: the limits.
        plans: one at least; none keeps to all of them.
    """

    def beyond(plan: Plan) -> float:
        return sum(each.by for each in excesses(plan, goals))

    nearest = min(plans, key=beyond)
    found = excesses(nearest, goals)
    cheapest = "cheapest " if [each.flag for each in found] == ["--max-cost"] else "nearest "
    where = ", ".join(nearest.stages.devices)
    rate = f"{per_step(nearest.graph) / nearest.forecast.step_s:,.4g} {unit(nearest.graph)}/s"
    return NoPlanError(
        f"no plan keeps to the limits; of the {cheapest}one, "
        + " and ".join(each.text for each in found),
        code="BX1345",
        notes=(f"the {cheapest}plan: {rate} on {where}", f"plans were compared: {len(plans)}"),
        help=" ".join(each.remedy for each in found),
    )


def require_countable(cluster: Cluster, options: Options) -> None:
    """Refuse limits of money where a price is missing, and of a training without its length.

    Raises:
        InputError: names the device, or the option.
    """
    goals = options.goals or Goals()
    lacking = [each.name for each in cluster.devices if each.name not in cluster.price]
    if lacking and (options.objective == "cost" or goals.needs_prices):
        raise InputError(
            f"device {lacking[0]} has no price, and plans are to be compared by cost",
            code="BX1346",
            help='add "price_per_hour_usd" to each device of the cluster file; 0 if it is yours',
        )
    flag = "--max-cost" if goals.max_usd is not None else "--deadline"
    if goals.tokens is None and (goals.max_usd, goals.deadline_s) != (None, None):
        raise InputError(
            f"{flag} is of a whole training, whose length is not known",
            code="BX1347",
            at=flag,
            help="add --tokens 1e9" + (", or --max-cost 5/h" if flag == "--max-cost" else ""),
        )
