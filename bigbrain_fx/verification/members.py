"""A plan with tensor groups beside its graph: ranks' graphs, their weights, their leaves.

captured graph ≈ ranks' graphs = reference = bundle      the first link alone is not bitwise
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from bigbrain_fx.core import Placement, Stage, Stages
from bigbrain_fx.frontend import Captured
from bigbrain_fx.plan import Plan, live_ops
from bigbrain_fx.runtime import OwnWeights, joined
from bigbrain_fx.verification.reference import MembersReference
from bigbrain_fx.verification.sharding import (
    agree,
    outputs_apart,
    outputs_rounding,
    own_rounding,
)
from bigbrain_fx.verification.trace import link, relative_error

_AS_NEAR = 3.0  # times the graph's own distance from float64
CLOSE = ((False, 1e-5), (True, 1e-12))
"""Whether in float64, and how far a gradient may be from the graph's, of its largest number."""


def whole_plan(plan: Plan) -> Plan:
    """Return a plan of the graph that is not divided, as one stage: what plain PyTorch runs."""
    device = plan.stages.devices[0]
    live = live_ops(plan.graph)
    ops = tuple(op.name for op in plan.graph.ops if op.name in live)
    params = dict.fromkeys(name for op in ops for name in plan.graph.op[op].params)
    stage = Stage(0, device, ops, params=tuple(params))
    return replace(plan, placement=Placement({}), stages=Stages((stage,), ()))


def joined_weights(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Read the weights of all ranks; parts are put together.

    Raises:
        WeightsError: a file cannot be read.
    """
    of = {(shard.param, shard.member): shard for shard in plan.sharded.shards}
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for device in plan.stages.devices:
        member = plan.stages.of(device)[0].member
        for name, tensor in OwnWeights(folder, device).items():
            if (name, member) in of:
                parts.setdefault(name, {})[member] = tensor
            else:
                found[name] = tensor
    for name, own in parts.items():
        shards = [of[name, member] for member in sorted(own)]
        lengths = [shard.stop - shard.start for shard in shards]
        tensors = [own[member] for member in sorted(own)]
        found[name] = joined(tensors, shards[0].dim, shards[0].inner, lengths)
    return found


def close_link(
    name: str,
    apart: Callable[[bool], float],
    rounding: Callable[[], float],
    said_of: Callable[[], tuple[str, str]],
) -> dict[str, object]:
    """Compare two graphs as they are and in float64.

    Where the first's own rounding is larger than the limit (16 bits, a norm over two rows), a few
    times that is allowed. Float64 shows whether a rule is wrong.

    Args:
        name: of the link.
        apart: whether in float64 -> the largest difference.
        rounding: the first graph's own.
        said_of: what differs, and what was compared, once it was.
    """
    found = []
    for exact, close in CLOSE:
        most, limit = apart(exact), close
        if not exact and limit < most < math.inf:
            limit = max(limit, _AS_NEAR * rounding())
        found.append((most, limit, "float64" if exact else "its own types"))
    noun, what = said_of()
    lines = [f"{noun} differs by {m:.1e} in {kind}" for m, most, kind in found if not m <= most]
    said = ", ".join(f"{m:.0e} in {kind} (allowed {most:g})" for m, most, kind in found)
    return link(name, lines, f"{what}: {said}")


def same_graph(captured: Captured, plan: Plan, few: int | None = None) -> dict[str, object]:
    """Compare the graph with the ranks' graphs: a step's loss, gradients and buffers.

    Where micro-batches have `few` rows, too, with so many.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    rows, counts = captured.graph.static_batch or few or plan.rows, []

    def apart(exact: bool) -> float:
        found = agree(captured, tensor.axes, tensor.shares, rows=rows, exact=exact)
        counts.append(found.compared)
        return max(found.loss, found.gradients, found.buffers)

    def said() -> tuple[str, str]:
        what = f"{counts[-1]} gradients, buffers and losses of {len(tensor.shares)} TP ranks"
        return "a loss, gradient or buffer", what

    of_few = f", micro-batches of {few} rows" if few else ""
    name = f"captured graph ≈ TP ranks' graphs{of_few}"
    return close_link(name, apart, partial(own_rounding, captured, rows), said)


def same_outputs(captured: Captured, plan: Plan) -> dict[str, object]:
    """Compare the outputs of the graph with those of the ranks' graphs, as `same_graph` does."""
    tensor = plan.placement.tensor
    assert tensor is not None
    rows = captured.graph.static_batch or plan.rows

    def apart(exact: bool) -> float:
        return outputs_apart(captured, tensor.axes, tensor.shares, rows=rows, exact=exact)

    said = "an output", f"outputs of {len(tensor.shares)} TP ranks"
    name = "captured graph ≈ TP ranks' graphs, outputs"
    return close_link(name, apart, partial(outputs_rounding, captured, rows), lambda: said)


def same_leaves(
    plan: Plan,
    weights: Mapping[str, Tensor],
    functions: Mapping[str, object],
    batch: Sequence[Mapping[str, Tensor]],
    limit: float,
) -> dict[str, object]:
    """Compare the reference with one whose parameters have one leaf each: rounding is all."""
    one = MembersReference(plan, weights, functions, leaves_per_stage=False)
    many = MembersReference(plan, weights, functions)
    _, want = one.of_each(batch, plan.seed, 0)
    _, have = many.of_each(batch, plan.seed, 0)
    errors = {
        reference_name: relative_error(have[member].get(name), gradient)
        for member, own in enumerate(want)
        for name, gradient in own.items()
        for reference_name in [one.stored(name, member)]
    }
    lines = [f"gradient of {n} differs by {e:.1e}" for n, e in errors.items() if e > limit]
    worst = f"largest difference {max(errors.values(), default=0.0):.1e} of a tensor's maximum"
    what = f"{len(errors)} gradients of step 0, {worst} (allowed {limit:g})"
    return link("TP ranks' graphs = reference", lines, what)
