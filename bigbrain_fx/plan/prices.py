"""Plan -> what a step costs: its devices by the hour, and bytes over links that charge for them.

`best_for` chooses among finished plans, by money or as `fastest` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from bigbrain_fx.core import Cluster, Graph, Send
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.replica_cut import piece_messages
from bigbrain_fx.plan.search import Objective
from bigbrain_fx.plan.search.nouns import Goals
from bigbrain_fx.plan.tensor import part_channels

HOUR_S = 3600.0
GB = 1e9
_INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class Money:
    """Price of a plan, in US dollars.

    Attributes:
        hour_usd: of the devices that it uses, by the hour.
        sent_usd: of the messages of a step.
        step_s: of its forecast.
    """

    hour_usd: float
    sent_usd: float
    step_s: float

    @property
    def step_usd(self) -> float:
        """Of a step: devices and messages."""
        return self.hour_usd * self.step_s / HOUR_S + self.sent_usd

    @property
    def spent_hour_usd(self) -> float:
        """Of an hour: devices and messages."""
        return self.step_usd / self.step_s * HOUR_S


def money(plan: Plan, among: Collection[str] = ()) -> Money | None:
    """Return what a plan costs; None, where a device that it uses has no price.

    Args:
        plan: what runs.
        among: devices that are left of it, between which messages are sent; (): all.
    """
    prices = plan.cluster.price
    used = [name for name in plan.stages.devices if not among or name in among]
    if not all(name in prices for name in used):
        return None
    hour_usd = sum(prices[name] for name in used)
    return Money(hour_usd, sum(_sent_usd(plan, frozenset(used))), plan.forecast.step_s)


def _sent_usd(plan: Plan, among: frozenset[str]) -> Iterator[float]:
    """Yield what each message of a step between some devices costs."""
    cluster = plan.cluster
    for a, b, nbytes in _sent(plan):
        if a in among and b in among:
            yield nbytes / GB * cluster.link(a, b).usd_per_gb


def _sent(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield both ends of each message of a step, and its bytes."""
    stages = plan.stages
    sends = (i for program in plan.programs for i in program.instructions if isinstance(i, Send))
    edges = [each.edge for each in sends]
    if stages.has_exchanges and not stages.by_backend:
        edges = [edge for edge in edges if edge.kind not in ("reduce", "gather")]
        edges += piece_messages(stages)
    for edge in edges:
        sender, receiver = (stages.stages[end].device for end in (edge.source, edge.target))
        yield sender, receiver, edge.nbytes
    for part in part_channels(plan):
        yield part.sender, part.receiver, part.nbytes


def tokens(graph: Graph) -> int:
    """Return how many tokens a row has: the longest input of whole numbers; 0 without one."""
    shapes = (entry.spec.shape for entry in graph.inputs if entry.spec.dtype in _INTEGERS)
    return max((int(s[1]) for s in shapes if len(s) == 2 and isinstance(s[1], int)), default=0)


def unit(graph: Graph) -> str:
    """Return the name of what a training counts: "tokens" or "rows"."""
    return "tokens" if tokens(graph) else "rows"


def per_step(graph: Graph) -> int:
    """Return how many tokens, or rows, a step computes."""
    return graph.batch * (tokens(graph) or 1)


def steps_for(graph: Graph, count: float) -> int:
    """Return the steps in which so many tokens, or rows, are computed."""
    return ceil(count / per_step(graph))


def best_for(objective: Objective, plans: Sequence[Plan], gap: float) -> Plan:
    """Return the cheapest plan for the objective cost, else as `simplest` does.

    Args:
        objective: what the user asked for.
        plans: one at least.
        gap: as in `simplest`.
    """
    return min(plans, key=step_usd) if objective == "cost" else simplest(plans, gap)


def step_usd(plan: Plan) -> float:
    """Return what a step costs; infinite, where a device has no price."""
    paid = money(plan)
    return float("inf") if paid is None else paid.step_usd


def charges_for_bytes(cluster: Cluster) -> bool:
    """Whether a plan may cost more than another that is slower on the same devices."""
    links = (cluster.default_link, *(link for _, _, link in cluster.links))
    return any(link.usd_per_gb for link in links)


# ------------------------------------------------------------------------------------------------
# Limits of money and time: whether a plan keeps to them, by how much it does not, what to do.


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
