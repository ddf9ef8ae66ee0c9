"""What planners reserve for a placement: an upper bound of what a plan's ledger books."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import InFlight, PieceMemory, Setting, Work, neighbours, stage_lists
from partitioners.baechi import Ledger
from partitioners.chain_dp import in_flight_by_device, upstream


def is_acyclic(before: Mapping[str, set[str]]) -> bool:
    """Whether no device waits for itself through others."""
    return all(device not in devices for device, devices in before.items())


def reserved(
    known: Work, cluster: Cluster, micro: int, homes: Sequence[str], in_flight: InFlight = None
) -> Mapping[str, int]:
    """Return the bytes of each device in use: of pieces of a chain, or of scattered units."""
    before = upstream(known, homes)
    if not is_acyclic(before):
        return scattered(known, cluster, micro if known.trains else 1, homes)
    flights = in_flight_by_device(before, micro, in_flight)
    numbers = [list(cluster.device).index(home) for home in homes]
    waits_for = neighbours(known.count, ((b, a) for a, b in known.edges))
    stages = stage_lists(waits_for, neighbours(known.count, known.edges), numbers)
    order = [unit for units in stages for unit in units]
    memory = PieceMemory(known, order, np.cumsum([0, *map(len, stages)]))
    return {
        device: math.ceil(
            memory.bytes_needed(device, flights[device], Setting(cluster, micro))[at, at + 1]
        )
        for at, device in enumerate(homes[units[0]] for units in stages)
    }


def scattered(
    known: Work, cluster: Cluster, flight: int, homes: Sequence[str]
) -> Mapping[str, int]:
    """Return the same where each unit may be a stage of its own."""
    ledger, numbers = Ledger(known, cluster, flight), list(cluster.device)
    for unit, home in enumerate(homes):
        ledger.move(unit, numbers.index(home))
    return {home: ledger.total(numbers.index(home)) for home in dict.fromkeys(homes)}
