"""Nothing fits -> an error that says how much is missing where, and the nearest change that helps.

It asks "would this fit?" through a function; it knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import NoPlanError
from partitioners.facts import Facts
from partitioners.footprint import needs, note, readable
from partitioners.line import Split

_MOST_NEW_DEVICES = 8
_PRECISION = 1.01


class Fits(Protocol):
    """Find a split that fits: `scale` multiplies every device's memory; None when there is none."""

    def __call__(
        self, facts: Facts, cluster: Cluster, micro_batches: int, scale: float
    ) -> Split | None:
        """Search."""
        ...


def no_plan(
    facts: Facts,
    cluster: Cluster,
    micro_batches: int,
    in_flight: Callable[[int, int, int], int],
    fits: Fits,
    remedy: str | None = None,
) -> NoPlanError:
    """Return the error for a model that does not fit.

    Args:
        facts: of the units, in the order that `fits` splits.
        cluster: what was offered.
        micro_batches: in one step.
        in_flight: (stage, stages, micro-batches) -> micro-batches held at once.
        fits: the search.
        remedy: one that is known already; otherwise some are tried.
    """
    scale, split = _least_scale(facts, cluster, micro_batches, fits)
    if split is None:
        count = len(facts.groups)
        return NoPlanError(
            f"{len(cluster.devices)} devices cannot share {count} groups of ops that stay together",
            help=f"use at most {count} devices, or let the planner leave some out",
        )
    help_ = remedy or next(_remedies(facts, cluster, micro_batches, fits), None)
    help_ = help_ or f"give every device {scale:.1f} times the memory, or add devices"
    flights = {
        device: in_flight(stage, len(split.sequence), micro_batches)
        for stage, device in enumerate(split.sequence)
    }
    found = needs(facts, split.device_of_unit, flights)
    return NoPlanError(
        "no split fits into the devices' memory; this is the nearest",
        notes=tuple(note(device, need, cluster) for device, need in found.items()),
        help=help_,
    )


def _least_scale(
    facts: Facts, cluster: Cluster, micro_batches: int, fits: Fits
) -> tuple[float, Split | None]:
    """Return the least factor on all memories with which something fits, to a hundredth."""
    low, high = 1.0, 2.0
    split = fits(facts, cluster, micro_batches, high)
    while split is None and high < 2.0**40:
        low, high = high, high * 2
        split = fits(facts, cluster, micro_batches, high)
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        closer = fits(facts, cluster, micro_batches, middle)
        low, high = (middle, high) if closer is None else (low, middle)
        split = closer or split
    return high, split


def _remedies(facts: Facts, cluster: Cluster, micro_batches: int, fits: Fits) -> Iterator[str]:
    """Yield changes that would help, the cheapest first."""
    factor = 2
    while factor <= facts.rows:
        more = micro_batches * factor
        if facts.rows % factor == 0 and fits(facts.smaller(factor), cluster, more, 1.0):
            yield f"should fit with --micro-batches {more}: {facts.rows // factor} rows in each"
        factor += 1 if factor < 8 else factor
    largest = max(cluster.devices, key=lambda device: device.memory_bytes)
    for extra in range(1, _MOST_NEW_DEVICES + 1):
        added = tuple(replace(largest, name=f"{largest.name} +{i}") for i in range(extra))
        wider = replace(cluster, devices=(*cluster.devices, *added))
        if fits(
            _with_devices(facts, largest.name, [d.name for d in added]), wider, micro_batches, 1.0
        ):
            plural = "device" if extra == 1 else "devices"
            yield (
                f"fits with {extra} more {plural} like {largest.name} "
                f"({readable(largest.memory_bytes)})"
            )


def _with_devices(facts: Facts, like: str, names: list[str]) -> Facts:
    """Return the facts with more devices that cost what `like` does."""
    return replace(
        facts,
        seconds={**facts.seconds, **dict.fromkeys(names, facts.seconds[like])},
        once_s={**facts.once_s, **dict.fromkeys(names, facts.once_s[like])},
        saved_bytes={**facts.saved_bytes, **dict.fromkeys(names, facts.saved_bytes[like])},
        workspace_bytes={
            **facts.workspace_bytes,
            **dict.fromkeys(names, facts.workspace_bytes[like]),
        },
    )
