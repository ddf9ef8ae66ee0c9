"""GPipe: every forward, then every backward. It knows nothing of messages, times or memory.

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      step = (m + p - 1)(tf + tb)
    stage 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .       in flight: m everywhere

Where weights lie in stores, devices have several stages and run them one after another, so that the
weights of each come once for all forwards, and once for all backwards.

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
    """Run all micro-batches forward, then all backward; needs one stage per device, or stores."""

    name: str = "gpipe"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: a device has several stages, or `in_flight` is given.
        """
        if "weights" not in stages.offload:
            require_chain(self.name, stages)
        if self.in_flight is not None:
            raise InputError(
                "schedule 'gpipe' keeps every micro-batch in flight and takes no in_flight",
                code="BX1313",
                help="use --schedule 1f1b, or leave in_flight out",
            )
        micros = range(micro_batches)
        orders: Orders = {}
        for device in stages.devices:
            own = [stage.index for stage in stages.of(device)]
            forwards = (Forward(stage, m) for stage in own for m in micros)
            backwards = (Backward(s, m) for s in reversed(own) for m in micros if s in trained)
            orders[device] = (*forwards, *backwards)
        return orders
