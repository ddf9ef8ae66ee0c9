"""Verdict of a plan, printed first: whether it fits, its speed, its limit and a better option.

Knows plans; prints nothing.
"""

from __future__ import annotations

from bigbrain_fx.core import Graph
from bigbrain_fx.plan import Explanation, Plan, size_text, spread, tokens

_BETTER = 0.995  # a step that is shorter by less is the same
_AUTO = "--partitioner auto also tries replicas, tensor parallelism and other schedules"


def rate_text(graph: Graph, rows_per_s: float) -> str:
    """Return a rate in tokens, where rows have them, or in rows a second."""
    each = tokens(graph)
    rate, unit = (rows_per_s * each, "tokens/s") if each else (rows_per_s, "rows/s")
    return f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"


def verdict(plan: Plan, explained: Explanation | None = None) -> tuple[str, ...]:
    """Return the lines that come first: fit and speed, limits, and what to try.

    Args:
        plan: it fits; a plan that does not is an error before.
        explained: with the neighbours of its cuts, one of which may be faster.
    """
    return (_speed(plan), _limits(plan), f"better: {_better(plan, explained)}")


def _speed(plan: Plan) -> str:
    step_s, around = plan.forecast.step_s, spread(plan)
    count, total = len(plan.stages.devices), len(plan.cluster.devices)
    where = f"{count} of {total}" if count < total else str(count)
    what = "step" if plan.mode == "train" else "batch"
    note = f"; {around.note}" if around.note else ""
    interval = f"90 % interval {around.low_s:.4g} to {around.high_s:.4g} s{note}"
    rate = rate_text(plan.graph, plan.micro_batches * plan.rows / step_s)
    return f"fits {where} device{'s' * (total != 1)}: {step_s:.4g} s a {what}, {rate} ({interval})"


def _limits(plan: Plan) -> str:
    found, step_s = plan.forecast.devices, plan.forecast.step_s
    slow = max(found, key=lambda entry: entry.busy_s)
    full = max(found, key=lambda e: e.peak_bytes / plan.cluster.device[e.device].memory_bytes)
    has = plan.cluster.device[full.device].memory_bytes
    mean = sum(entry.busy_s for entry in found) / len(found) / step_s
    return (
        f"limits: {slow.device} is busy {100 * slow.busy_s / step_s:.0f} % of a step (all devices "
        f"{100 * mean:.0f} %); {full.device} is fullest, {size_text(full.peak_bytes)} of "
        f"{size_text(has)} ({100 * full.peak_bytes / has:.0f} %)"
    )


def _better(plan: Plan, explained: Explanation | None) -> str:
    cuts = explained.cuts if explained is not None else ()
    others = [each for cut in cuts for each in cut.alternatives if each.step_s is not None]
    best = min(others, key=lambda each: each.step_s or 0.0, default=None)
    if best is not None and (best.step_s or 0.0) < _BETTER * plan.forecast.step_s:
        where = f"{best.block}={best.to_device}"
        return f"--pin {where}; with that block moved alone {best.step_s:.4g} s a step"
    if plan.search is not None and plan.search.gaps:
        gap, count = plan.search.gaps[0], plan.search.simulated
        return f"none of the {count} plans simulated; within {100 * gap:.1f} % of the lower bound"
    if len(plan.cluster.devices) == 1:
        return "no other split of one device; a second device, or a smaller model"
    if len(plan.stages.devices) < len(plan.cluster.devices):
        return f"{_AUTO}; --partitioner naive divides the model over all devices"
    return _AUTO
