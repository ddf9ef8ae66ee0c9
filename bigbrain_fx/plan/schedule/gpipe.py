"""GPipe: every forward, then every backward. It knows nothing of messages, times or memory.

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      step = (m + p - 1)(tf + tb)
    stage 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .       in flight: m everywhere

Source: Huang et al., GPipe, NeurIPS 2019; here backwards go in ascending micro-batch order too,
which costs the same and fixes the order in which gradients are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Backward, Forward, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.chain import require_chain
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders


@dataclass(frozen=True)
class GPipe:
    """Run all micro-batches forward, then all backward; needs one stage per device."""

    name: str = "gpipe"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: a device has several stages, or `in_flight` is given.
        """
        require_chain(self.name, stages)
        if self.in_flight is not None:
            raise InputError(
                "schedule 'gpipe' keeps every micro-batch in flight and takes no in_flight",
                help="use --schedule 1f1b, or leave in_flight out",
            )
        micros = range(micro_batches)
        orders: Orders = {}
        for stage in stages.stages:
            forwards = tuple(Forward(stage.index, m) for m in micros)
            backwards = tuple(Backward(stage.index, m) for m in micros if stage.index in trained)
            orders[stage.device] = forwards + backwards
        return orders
