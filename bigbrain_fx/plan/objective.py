"""Finished plans of one model -> the best for an objective."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Cluster
from bigbrain_fx.plan.fastest import simplest
from bigbrain_fx.plan.money import money
from bigbrain_fx.plan.nouns import Plan
from bigbrain_fx.plan.search import Objective


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
