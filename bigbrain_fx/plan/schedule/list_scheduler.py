"""The list scheduler: any stage graph; a device that is free takes what is ready.

What was played in time order is written down as each device's program; what happened once cannot
deadlock. A backward goes before a forward, and an early micro-batch before a late one: see
`planning.listing`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import timed_stages, with_instructions, without_backward
from bigbrain_fx.planning import Taste, VirtualStages, in_flight_to_fill, list_orders


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
        timed = timed_stages(stages, costs.whole, trained)
        untrained = without_backward(stages, trained)
        in_flight = self.in_flight or in_flight_to_fill(timed, micro_batches, untrained)
        whole = VirtualStages.unsplit(timed, micro_batches, untrained)
        orders = list_orders(whole, Taste(deep=False), dict(enumerate(in_flight)))
        assert orders is not None, "nothing lacks room where no bytes are counted"
        return with_instructions(stages, (orders[device] for device in timed.devices), trained)
