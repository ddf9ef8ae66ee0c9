"""The schedule `auto`: an order found for these stages, under the room that devices have.

It runs any stage graph. Where gradients are not clipped, a step in a row is made short: a device
begins its next step when its own program ends; else a step alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import virtual_stages, with_instructions
from bigbrain_fx.planning import Synthesis, synthesise

WORK = 1_000_000
"""Jobs to play for an order, about: a second."""


@dataclass(frozen=True)
class Synthesised:
    """Search an order; `room_bytes` is by device for what is saved and what waits."""

    name: str = "auto"
    in_flight: tuple[int, ...] | None = None
    room_bytes: Mapping[str, float] | None = None
    work: int = WORK

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: `in_flight` is given.
            NoPlanError: a device has no room for one micro-batch.
        """
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
