"""The link of a rewritten graph: what the bundle runs against the graph as it was captured.

    plain PyTorch = captured graph ≈ rewritten graph = reference = bundle

A wrong rewrite is not rounding: 1e-5 of the largest in float32, 1e-12 in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bigbrain_fx.frontend import Captured
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification.members import close_link, whole_plan
from bigbrain_fx.verification.sharding import (
    outputs_rounding,
    own_rounding,
    rewritten_apart,
)


def as_written(captured: Captured, plan: Plan) -> Plan:
    """Return the plan; of a rewritten graph, one of the captured graph in one stage."""
    if not plan.source.rewritten:
        return plan
    return whole_plan(replace(plan, graph=captured.graph))


def same_rewritten(captured: Captured, plan: Plan) -> list[dict[str, object]]:
    """Compare a rewritten graph with the captured one; no check where nothing is rewritten."""
    if not plan.source.rewritten:
        return []
    rows, found = captured.graph.static_batch or plan.rows, [(0.0, 0)]

    def apart(exact: bool) -> float:
        found.append(rewritten_apart(captured, plan.graph, rows, exact=exact))
        return found[-1][0]

    def said() -> tuple[str, str]:
        what = f"{found[-1][1]} tensors, {len(plan.source.rewritten)} places rewritten"
        return "a loss, gradient or output", what

    own = own_rounding if captured.graph.training else outputs_rounding
    name = "captured graph ≈ rewritten graph"
    link = close_link(name, apart, partial(own, captured, rows), said)
    return [{**link, "rounded": any(most for most, _ in found)}]
