"""A device among the other replicas: who sums what with it, as buckets.json says.

Copied into bundles with replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .buckets import Listed, buckets_of
from .feature import Feature
from .replicas import Replicas
from .statistics import Statistics, groups_of

if TYPE_CHECKING:
    from .device import Device
    from .unsharded import Unsharded


class ReplicaRuns(Feature):
    """Give gradients and statistics of micro-batches to what replicas sum."""

    def begin_step(self, step: int) -> None:
        """Begin the step's sums."""
        self.device.replicas.begin()
        self.device.statistics.begin()

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Keep back the statistics that a forward writes."""
        if phase == "backward" or not self.device.statistics.has(stage):
            return nullcontext()
        sizes = self.device.stream.sizes
        counts = not sizes or sizes[micro] > 0
        found: AbstractContextManager[None] = self.device.statistics.noting(
            stage, micro, again=phase == "again", counts=counts
        )
        return found

    def on_gradient(self, name: str, stage: int, micro: int, gradient: Tensor) -> bool:
        """Add a gradient to its bucket."""
        taken: bool = self.device.replicas.add(name, stage, micro, gradient)
        return taken

    def after_update(self) -> None:
        """End the step's statistics."""
        self.device.statistics.end()


def join(device: Device, listed: Listed, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Let a device sum gradients with other replicas: `listed` is what buckets.json says.

    With ZeRO 3, take from `tensors` the weights that this replica keeps.

    Raises:
        WeightsError: it names parameters or buffers that this device does not hold.
    """
    if device.replicas is None:
        device.add(ReplicaRuns())
    device.replicas = replicas_of(device, listed)
    device.statistics = statistics_of(device, listed)
    if device.zero_stage == 3:
        from .unsharded import GatheredWeights  # only bundles that divide weights have it

        if device.unsharded is None:
            device.add(GatheredWeights(), outermost=True)
        device.unsharded = unsharded_of(device, device.replicas, listed, tensors or {})


def replicas_of(device: Device, listed: Listed) -> Replicas:
    """Return what a device sums with other replicas, and how."""
    sums = _sums(listed)
    found = [*buckets_of(sums, device.name, tuple(device.stages), device.channels)]
    about = device.micros, device.parameters, device.transport
    over: Any = device.transport
    if device.sum_order == "backend" and hasattr(over, "ranks"):  # one process sends messages
        from .collectives import CollectiveReplicas, new_groups, process_groups  # such bundles'

        make = partial(new_groups, over.ranks, over.deadline)
        groups = process_groups(sums, make, device.name)
        across = process_groups(sums, make, device.name, across=True)
        return CollectiveReplicas(found, *about, groups, device.zero_stage, across)
    order = "replica" if device.sum_order == "backend" else device.sum_order
    each = device.sum_order == "micro" or device.zero_stage >= 2
    return Replicas(found, order, *about, each)


def statistics_of(device: Device, listed: Listed) -> Statistics:
    """Return the running statistics that a device keeps like other replicas."""
    sums = _sums(listed)
    written = {name: entry for name, entry in listed.items() if name not in sums}
    groups = [*groups_of(written, device.name, device.modules, device.channels)]
    return Statistics(groups, device.micros, device.transport)


def unsharded_of(
    device: Device, replicas: Replicas, listed: Listed, tensors: Mapping[str, Tensor]
) -> Unsharded:
    """Return who gathers a device's weights under ZeRO 3, with those that this replica keeps.

    Raises:
        WeightsError: a tensor is missing or has another shape.
    """
    from .unsharded import Unsharded  # only bundles that divide weights have it

    found = Unsharded(replicas, listed)
    for module in device.modules.values():
        found.fill(module, tensors, device.aliases)
    return found


def _sums(listed: Listed) -> Listed:
    return {name: entry for name, entry in listed.items() if "params" in entry}
