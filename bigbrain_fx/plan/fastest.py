"""Several tries at a plan -> the fastest of them, or why the first made none; or the simplest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.plan.apart import times_counted
from bigbrain_fx.plan.nouns import Plan


def fastest(tries: Iterable[Callable[[], Plan]], *, but: tuple[type[BigBrainError], ...]) -> Plan:
    """Return the plan with the shortest step; of equals the first.

    Args:
        tries: each makes a plan.
        but: errors by which a try says that it makes none; others end the search.

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
    return min(found, key=lambda plan: plan.forecast.step_s)


def first(tries: Sequence[Callable[[], Plan]], *, but: tuple[type[BigBrainError], ...]) -> Plan:
    """Return the first plan of these that there is.

    Raises:
        BigBrainError: no try makes a plan; the last one's.
    """
    for make in tries[:-1]:
        with suppress(*but):
            return make()
    return tries[-1]()


def simplest(plans: Sequence[Plan], gap: float) -> Plan:
    """Return the simplest of the plans that are as fast as the fastest.

    Args:
        plans: one at least.
        gap: a plan that is faster by a smaller share is taken for as fast; of such plans the one
            with the fewest replicas, members of tensor groups, devices, and the least of ZeRO.
    """
    most_s = min(map(counted_s, plans)) * (1 + gap)
    return min((plan for plan in plans if counted_s(plan) <= most_s), key=_simplicity)


def counted_s(plan: Plan) -> float:
    """Return what a step counts in comparisons: of split backwards more than its forecast."""
    return plan.forecast.step_s * times_counted(is_split=bool(plan.stages.deferring))


def _simplicity(plan: Plan) -> tuple[float, ...]:
    stages = plan.stages
    counts = stages.replicas, stages.members, len(stages.devices), stages.zero_stage
    return *counts, bool(stages.deferring), counted_s(plan)
