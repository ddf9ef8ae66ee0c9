"""Several tries at a plan -> the fastest of them, or why the first made none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bigbrain_fx.errors import BigBrainError
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
