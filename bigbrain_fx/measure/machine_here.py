"""A `Machine` of a cluster file, or of this host as it is measured."""

from __future__ import annotations

from pathlib import Path

from bigbrain_fx.bundles import Machine
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.measure.host import probe


def machine(devices: str | Path | Cluster | None = None, *, count: int = 2) -> Machine:
    """Return devices to train on as if they were one.

    Args:
        devices: a cluster.json, or a Cluster; None measures this host, which takes some seconds.
        count: how many devices this host is then: its GPUs where it has so many, else processes.
    """
    if devices is None:
        return Machine(probe(devices=count).cluster)
    return Machine(devices if isinstance(devices, Cluster) else read_cluster(devices))
