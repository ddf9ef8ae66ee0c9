"""Nothing fits -> an error that says how much is missing where, for the split that lacks least.

It asks "would this fit?" through a function; it knows no method. What to change is looked for by
who plans (`bigbrain_fx.plan.remedy`), for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning import Work
from partitioners.footprint import needs, note

_PRECISION = 1.01

Fits = Callable[[float], Sequence[str] | None]
"""Factor of every device's memory -> a split that fits, as the device of every unit, if any."""


def no_plan(
    known: Work, cluster: Cluster, in_flight: Callable[[int, int], int], fits: Fits
) -> NoPlanError:
    """Return the error for a model that does not fit; the nearest is sought when that is read."""
    return NoPlanError.later(lambda: _said(known, cluster, in_flight, fits))


def _said(
    known: Work, cluster: Cluster, in_flight: Callable[[int, int], int], fits: Fits
) -> NoPlanError:
    scale, homes = _least_scale(fits)
    if homes is None:
        count = len(known.groups)
        return NoPlanError(
            f"{len(cluster.devices)} devices cannot share {count} groups of ops that stay together",
            code="BX1405",
            help=f"use at most {count} devices, or let the planner leave some out",
        )
    sequence = list(dict.fromkeys(homes))
    flights = {device: in_flight(stage, len(sequence)) for stage, device in enumerate(sequence)}
    found = needs(known, homes, flights)
    return NoPlanError(
        "no split fits into the devices' memory; this is the nearest",
        code="BX1406",
        notes=tuple(note(device, need, cluster) for device, need in found.items()),
        help=f"give every device {scale:.1f} times the memory, or use more micro-batches, or more "
        "devices",
        nearest=known.placed(homes, sequence[0]),
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
