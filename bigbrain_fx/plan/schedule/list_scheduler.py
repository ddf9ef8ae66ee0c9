"""The list scheduler: any stage graph; a device that is free takes what is ready.

What `play` did, in time order, is written down as each device's program; what happened once cannot
deadlock. It knows nothing of messages; physics and priorities are in `greedy`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.greedy import play
from bigbrain_fx.plan.schedule.in_flight import in_flight_to_fill
from bigbrain_fx.plan.schedule.messages import Orders


@dataclass(frozen=True)
class ListScheduler:
    """Schedule any stage graph greedily in simulated time.

    `in_flight` is the most micro-batches that are on a device at once, per device in the order of
    `stages.devices`; None is enough to fill the pipeline (`in_flight_to_fill`).
    """

    name: str = "list"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order; each Backward with its BackwardWeight."""
        costs = costs.whole
        in_flight = self.in_flight or in_flight_to_fill(stages, micro_batches, costs, trained)
        limits = dict(zip(stages.devices, in_flight, strict=True))
        return play(stages, micro_batches, costs, trained, limits).orders
