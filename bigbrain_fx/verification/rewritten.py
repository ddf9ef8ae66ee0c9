"""The link of a rewritten graph: what the bundle runs against the graph as it was captured.

    plain PyTorch = captured graph ≈ rewritten graph = reference = bundle

A wrong rewrite is not rounding: 1e-5 of the largest in float32, 1e-12 in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bigbrain_fx.frontend import Captured
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification.members import CLOSE, whole_plan
from bigbrain_fx.verification.module import link
from bigbrain_fx.verification.sharding import (
    outputs_rounding,
    own_rounding,
    rewritten_apart,
)

_AS_NEAR = 3.0  # times the graph's own distance from float64


def as_written(captured: Captured, plan: Plan) -> Plan:
    """Return the plan; of a rewritten graph, one of the captured graph in one stage."""
    if not plan.source.rewritten:
        return plan
    return whole_plan(replace(plan, graph=captured.graph))


def same_rewritten(captured: Captured, plan: Plan) -> list[dict[str, object]]:
    """Compare a rewritten graph with the captured one; no check where nothing is rewritten."""
    if not plan.source.rewritten:
        return []
    rows = captured.graph.static_batch or plan.rows
    lines, said, rounded = [], [], False
    for exact, limit in CLOSE:
        most, count = rewritten_apart(captured, plan.graph, rows, exact=exact)
        if not exact and limit < most < math.inf:
            own = own_rounding if captured.graph.training else outputs_rounding
            limit = max(limit, _AS_NEAR * own(captured, rows))
        rounded = rounded or most > 0
        kind = "float64" if exact else "its own types"
        said.append(f"{most:.0e} in {kind} (allowed {limit:g})")
        if not most <= limit:
            lines.append(f"a loss, gradient or output differs by {most:.1e} in {kind}")
    places = len(plan.source.rewritten)
    what = f"{count} tensors, {places} places rewritten: {', '.join(said)}"
    return [{**link("captured graph ≈ rewritten graph", lines, what), "rounded": rounded}]
