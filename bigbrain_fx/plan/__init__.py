"""Plan: everything that is decided before a process starts; and the search for a good one.

This room knows graph, cluster, plug-ins, cut, schedules and the simulator. It knows nothing of
torch, of emitted text, or of how a plan is run. `plan.json` is the noun `Plan`, field by field.

    Options ──make_plan──▶ one plan for each number of micro-batches, or Judge ⇄ search ──▶ Plan
"""

from __future__ import annotations

from bigbrain_fx.plan.making import (
    costs_of,
    make_plan,
    measured_share,
    plan_placed,
    replan,
    timeline,
    with_placement,
)
from bigbrain_fx.plan.nouns import AUTO, FORMAT, Options, Plan, Source, to_json
from bigbrain_fx.plan.reading import from_json, read_plan

__all__ = [
    "AUTO",
    "FORMAT",
    "Options",
    "Plan",
    "Source",
    "costs_of",
    "from_json",
    "make_plan",
    "measured_share",
    "plan_placed",
    "read_plan",
    "replan",
    "timeline",
    "to_json",
    "with_placement",
]
