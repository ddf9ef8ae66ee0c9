"""Plan -> what a step costs: its devices by the hour, and bytes over links that charge for them.

`best_for` chooses among finished plans, by money or as `fastest` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from bigbrain_fx.core import Cluster, Graph, Send
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.replica_cut import piece_messages
from bigbrain_fx.plan.search import Objective
from bigbrain_fx.plan.tensor import part_channels

HOUR_S = 3600.0
GB = 1e9
_INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class Money:
    """What a plan costs, in US dollars.

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
