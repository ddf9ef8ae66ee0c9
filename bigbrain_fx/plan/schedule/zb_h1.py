"""ZB-H1: 1F1B whose backwards are split; gradients of weights fill the gaps at a step's end.

    stage 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 ...    f = b = w, p = 4, M = 8: 27 units,
    stage 1  .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 ...    where 1F1B takes 33 and 24 are work
    stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 ...
    stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 ...    in memory: p micro-batches at most

Stage s has p - s micro-batches between forward and backward, as with 1F1B, and s more between
backward and W. It knows nothing of messages, times or bytes.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2, in the order of
torch.distributed.pipelining's ScheduleInterleavedZeroBubble with one stage a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.chain import require_chain
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.one_f_one_b import require_falling
from bigbrain_fx.plan.schedule.virtual import with_instructions
from bigbrain_fx.planning import zb_h1


@dataclass(frozen=True)
class ZeroBubbleH1:
    """Alternate forward, backward and the backward of weights; needs one stage per device.

    `in_flight` is as in `OneForwardOneBackward`.
    """

    name: str = "zb-h1"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: a device has several stages, or `in_flight` grows along the chain.
        """
        require_chain(self.name, stages)
        count = len(stages.stages)
        in_flight = self.in_flight or tuple(range(count, 0, -1))
        require_falling(in_flight, trained)
        return with_instructions(stages, zb_h1(count, micro_batches, in_flight), trained)
