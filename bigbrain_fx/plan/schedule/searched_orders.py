"""Orders found by the clock, for any stage graph: `list` and `auto`.

`auto` searches an order under the room that devices have. Where gradients are not clipped, a step
in a row is made short: a device begins its next step when its own program ends; else a step alone.
With `list` a device that is free takes what is ready: a backward before a forward, an early
micro-batch before a late one (`planning.listing`). Played once, such an order cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import (
    Schedule,
    timed_stages,
    virtual_stages,
    with_instructions,
    without_backward,
)
from bigbrain_fx.planning import (
    Synthesis,
    Taste,
    VirtualStages,
    in_flight_to_fill,
    list_orders,
    synthesise,
)

WORK = 1_000_000
"""Jobs to play for an order, about: a second."""


@dataclass(frozen=True)
class Synthesised(Schedule):
    """Search an order; `room_bytes` is by device for what is saved and what waits."""

    name = "auto"
    splits = True
    searches = True
    room_bytes: Mapping[str, float] | None = None
    work: int = WORK

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        if self.in_flight is not None:
            raise InputError(
                "schedule 'auto' goes by the bytes that are in flight, and takes no in_flight",
                code="BX1317",
                help="use --schedule list, or leave in_flight out",
            )
        found = self.found(stages, micro_batches, costs, trained)
        ranked = (found.orders[place] for place in range(len(stages.devices)))
        return with_instructions(stages, ranked, trained)

    def found(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Synthesis:
        """Return the order with what is known of it."""
        given = virtual_stages(stages, micro_batches, costs, trained, self.room_bytes)
        return synthesise(given, in_row=goes_in_row(stages), work=self.work)


def goes_in_row(stages: Stages) -> bool:
    """Whether devices begin a step without waiting for all others: nothing is clipped."""
    return not any(edge.kind == "norm" for edge in stages.edges)


class ListScheduler(Schedule):
    """Schedule any stage graph greedily in simulated time.

    `in_flight` is the most micro-batches that are on a device at once, per device in the order of
    `stages.devices`; None is enough to fill the pipeline (`in_flight_to_fill`).
    """

    name = "list"

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        timed = timed_stages(stages, costs.whole, trained)
        untrained = without_backward(stages, trained)
        in_flight = self.in_flight or in_flight_to_fill(timed, micro_batches, untrained)
        whole = VirtualStages.unsplit(timed, micro_batches, untrained)
        orders = list_orders(whole, Taste(deep=False), dict(enumerate(in_flight)))
        assert orders is not None, "nothing lacks room where no bytes are counted"
        return with_instructions(stages, (orders[device] for device in timed.devices), trained)
