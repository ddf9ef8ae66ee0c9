"""Which numbers of micro-batches a search looks at, of those that divide a batch."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.plan.search.nouns import (
    LATENCY_MICRO_BATCHES,
    LIMITS,
    MANY_DEVICES,
    Ask,
    require_known,
)

INSTRUCTIONS = 6
"""Of a stage and micro-batch: forward, backward, and the messages of both."""


def numbers(ask: Ask) -> tuple[int, ...]:
    """Return the numbers of micro-batches to try; for `latency` few, or the fewest there are.

    Of very many devices those whose programs, on all of them, are soon simulated.

    Raises:
        InputError: no such objective or effort.
    """
    require_known(ask.objective, ask.effort)
    devices, known, most = len(ask.cluster.devices), ask.micro_batches, most_micro_batches(ask)
    every = tuple(n for n in known if n <= most) or (min(known),)
    if ask.objective != "latency":
        around, at_most = 4 * devices, LIMITS[ask.effort].counts
        return spread(every, around, at_most, many=devices > MANY_DEVICES)
    few = tuple(n for n in every if n <= LATENCY_MICRO_BATCHES)
    return few or (min(every),)


def most_micro_batches(ask: Ask) -> int:
    """Return the most micro-batches whose programs, on all devices, are soon simulated."""
    return LIMITS[ask.effort].instructions // (INSTRUCTIONS * len(ask.cluster.devices))


def spread(every: Sequence[int], around: int, most: int, *, many: bool) -> tuple[int, ...]:
    """Return the least number, and those nearest to `around` by ratio, `most` at all.

    Of `many` devices the largest instead: one micro-batch keeps a long pipeline idle, and all that
    is in flight on one fits only where micro-batches are small.
    """
    if len(every) <= most:
        return tuple(every)
    end = every[-1] if many else every[0]
    others = (n for n in every if n != end)
    nearest = sorted(others, key=lambda n: (max(n / around, around / n), n))
    return tuple(sorted((end, *nearest[: most - 1])))
