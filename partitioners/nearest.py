"""Nothing fits -> an error that says how much is missing where, for the split that lacks least.

It asks "would this fit?" through a function; it knows no method. What to change is looked for by
who plans (`bigbrain_fx.plan.remedy`), for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigbrain_fx.errors import NoPlanError

from .memory_bound import MemoryBound

_PRECISION = 1.01

Fits = Callable[[float], Sequence[str] | None]
"""Factor of every device's memory -> a split that fits, as the device of every unit, if any."""


def no_plan(bound: MemoryBound, fits: Fits) -> NoPlanError:
    """Return the error for a model that does not fit; the nearest is sought when that is read."""
    return NoPlanError.later(lambda: _error(bound, fits))


def _error(bound: MemoryBound, fits: Fits) -> NoPlanError:
    scale, homes = _least_scale(fits)
    if homes is None:
        count, devices = bound.known.count, len(bound.cluster.devices)
        return NoPlanError(
            f"{devices} devices cannot share {count} groups of ops that stay together",
            code="BX1405",
            help=f"use at most {count} devices, or let the planner leave some out",
        )
    return NoPlanError(
        "no split fits into the devices' memory; this is the nearest",
        code="BX1406",
        notes=bound.notes(homes),
        help=f"give every device {scale:.1f} times the memory, or use more micro-batches, or more "
        "devices",
        nearest=bound.known.placed(homes, homes[0]),
    )


def _least_scale(fits: Fits) -> tuple[float, Sequence[str] | None]:
    """Return the least factor on all memories with which something fits, to a hundredth."""
    low, high = 1.0, 2.0
    split = fits(high)
    while split is None and high < 2.0**40:
        low, high = high, high * 2
        split = fits(high)
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        closer = fits(middle)
        low, high = (middle, high) if closer is None else (low, middle)
        split = closer or split
    return high, split
