"""The sequences of devices that partitioners try along a pipeline."""

from __future__ import annotations

from itertools import islice

from bigbrain_fx.core import Cluster
from bigbrain_fx.orders import beginnings, distinct_orders, rates, sorted_orders

MOST_SEQUENCES = 2000  # six unlike devices have 1956
_LENGTHS_TRIED = 16


def device_sequences(cluster: Cluster, use_all: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the orders of devices along the pipeline that are worth trying, longest first.

    Every order of every subset, where devices that could be swapped without a difference (same
    rates, memory and links) are taken in the given order; when that makes more than
    `MOST_SEQUENCES`: the given order, and orders sorted by speed, memory and host, and the
    beginnings of each.

    Args:
        cluster: the devices and their links.
        use_all: leave out sequences that do not use every device.
    """
    whole = len(cluster.devices)
    every = list(islice(distinct_orders(cluster, rates), MOST_SEQUENCES + 1))
    if len(every) > MOST_SEQUENCES:
        every = list(beginnings(sorted_orders(cluster), whole // _LENGTHS_TRIED))
    kept = [sequence for sequence in every if not use_all or len(sequence) == whole]
    return tuple(sorted(kept, key=len, reverse=True))  # stable: the given order stays in front
