"""Orders of devices for a pipeline of a middling size: no graph is at hand."""

from __future__ import annotations

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning.device_orders import Rough, device_orders as orders_for

_BYTES = 1 << 20


def device_orders(cluster: Cluster, most: int) -> tuple[tuple[str, ...], ...]:
    """Return orders for a work of 10 GFLOP, and cuts of 1 MiB."""
    whole_s = {device.name: 1e10 / device.flops_per_s for device in cluster.devices}
    return orders_for(cluster, most, Rough(whole_s, _BYTES, _BYTES, 8))
