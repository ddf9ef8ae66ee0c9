"""The orders of devices that the search tries along a pipeline. No times, no splits."""

from __future__ import annotations

from itertools import islice

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.orders import beginnings, distinct_orders, rates, sorted_orders

_MOST_SORTED = 96


def device_orders(cluster: Cluster, most: int) -> tuple[tuple[str, ...], ...]:
    """Return orders of subsets of the devices, those with most devices first.

    All of them, where devices that could change places without a difference count as one; if they
    are more than `most`, the given order and orders by speed, memory and host, their mirror images,
    and the beginnings of each.
    """

    def trait(device: Device) -> tuple[object, ...]:
        """Hosts count where devices of one host share something."""
        host = device.host if cluster.hosts else None
        return rates(device), device.overheads, host

    every = list(islice(distinct_orders(cluster, trait), most + 1))
    if len(every) > most:
        whole = sorted_orders(cluster)
        lengths = max(1, min(most, _MOST_SORTED) // len(whole))
        every = list(beginnings(whole, -(-len(cluster.devices) // lengths)))
    return tuple(sorted(every, key=len, reverse=True))  # stable: the given order stays in front
