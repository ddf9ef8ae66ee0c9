"""For what a line of units is cut: micro-batches, memory, and how many are in flight on a stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning.unit_io import AHEAD

InFlight = int | tuple[int, ...] | None


def in_flight_at(stage: int, stages: int, micro_batches: int, in_flight: InFlight) -> int:
    """Return how many micro-batches a stage holds at once.

    Args:
        stage: from 0.
        stages: how many the pipeline has.
        micro_batches: in one step.
        in_flight: a number for every stage (GPipe: `micro_batches`), one per stage from the first,
            or None for classic 1F1B: the last stage holds one, the one before it two, and so on.
    """
    if in_flight is None:
        return max(1, min(micro_batches, stages - stage))
    wanted = in_flight if isinstance(in_flight, int) else in_flight[min(stage, len(in_flight) - 1)]
    return max(1, min(micro_batches, wanted))


@dataclass(frozen=True)
class Setting:
    """For what a line is cut.

    Attributes:
        cluster: with the memory that is left for tensors.
        micro_batches: in one step; what is done once a step counts 1/micro_batches of each.
        recompute: whether every stage runs its forward again.
        in_flight: see `in_flight_at`.
        at_most: in flight on any stage.
        memory_scale: multiplies every device's memory.
    """

    cluster: Cluster
    micro_batches: int
    recompute: bool = False
    in_flight: InFlight = None
    at_most: int | None = None
    memory_scale: float = 1.0

    def flight(self, stage: int, stages: int) -> int:
        """Return how many micro-batches a stage holds at once."""
        found = in_flight_at(stage, stages, self.micro_batches, self.in_flight)
        return found if self.at_most is None else min(found, self.at_most)

    def memory_bytes(self, device: str) -> float:
        """Return what a device has for tensors."""
        return self.cluster.device[device].memory_bytes * self.memory_scale

    @cached_property
    def ahead(self) -> int:
        """How many receives are posted ahead on a channel: none over nccl."""
        return 0 if all(device.kind == "cuda" for device in self.cluster.devices) else AHEAD
