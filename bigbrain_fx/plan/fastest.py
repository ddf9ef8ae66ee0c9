"""Several tries at a plan -> the fastest of them, or why the first made none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.plan.nouns import Plan


def fastest(
    tries: Iterable[Callable[[], Plan]],
    *,
    but: tuple[type[BigBrainError], ...],
    apart: float = 0.0,
) -> Plan:
    """Return the plan with the shortest step; of equals the first.

    Args:
        tries: each makes a plan.
        but: errors by which a try says that it makes none; others end the search.
        apart: a plan that is faster by a smaller share is taken for as fast, and of such plans the
            one with the fewest replicas and devices.

    Raises:
        BigBrainError: no try makes a plan; the first one's.
    """
    found: list[Plan] = []
    failure: BigBrainError | None = None
    for make in tries:
        try:
            found.append(make())
        except but as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    most_s = min(plan.forecast.step_s for plan in found) * (1 + apart)
    near = [plan for plan in found if plan.forecast.step_s <= most_s]
    return min(near, key=_simplicity if apart else _step_s)


def _step_s(plan: Plan) -> float:
    return plan.forecast.step_s


def _simplicity(plan: Plan) -> tuple[float, ...]:
    return plan.stages.replicas, len(plan.stages.devices), plan.forecast.step_s
