"""The lower bound of a step: how far from the best any plan can be. It knows no schedule.

every plan   max(micro_batches x work / all devices together, the longest path)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import Array, Work, least_busy_s


def bound_of_all(work: Work, cluster: Cluster, micro_batches: int) -> float:
    """Return seconds that no plan of any kind goes below, for this number of micro-batches."""
    names = [device.name for device in cluster.devices]
    step_s = min(device.overheads.step_s for device in cluster.devices)
    if work.count == 0:
        return step_s
    seconds = np.stack([_unit_s(work, name, micro_batches) for name in names])
    return step_s + max(micro_batches * least_busy_s(seconds), _longest_path_s(work, names))


def _unit_s(work: Work, device: str, micro_batches: int) -> Array:
    on = work.on[device]
    found: Array = on.forward_s + on.backward_s + on.once_s / micro_batches
    return found


def _longest_path_s(work: Work, names: Sequence[str]) -> float:
    """Return the longest path through the units, there and back, each on its fastest device."""
    forward = np.stack([work.on[name].forward_s for name in names]).min(axis=0)
    both = np.stack([work.on[n].forward_s + work.on[n].backward_s for n in names]).min(axis=0)
    ends_forward, ends_both = np.zeros(work.count), np.zeros(work.count)
    makers: list[list[int]] = [[] for _ in range(work.count)]
    graded: list[list[int]] = [[] for _ in range(work.count)]
    for value in work.values:
        for reader in value.readers:
            makers[reader].append(value.maker)
        for reader in work.flows(value):
            graded[reader].append(value.maker)
    for unit in range(work.count):
        before = max((ends_forward[maker] for maker in makers[unit]), default=0.0)
        ends_forward[unit] = before + forward[unit]
        before = max((ends_both[maker] for maker in graded[unit]), default=0.0)
        ends_both[unit] = before + both[unit]
    return float(max(ends_forward.max(), ends_both.max()))
