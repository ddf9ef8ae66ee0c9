"""1F1B: forward until enough micro-batches are in flight, then one backward, one forward, in turn.

It knows nothing of messages, times or memory; `in_flight` is decided by whoever builds the plan.

    stage 0  F0 F1 F2 .  .  .  B0 F3 .  B1 F4 .  B2 ...     step = (m + p - 1)(tf + tb)
    stage 1  .  F0 F1 .  .  B0 F2 .  B1 F3 .  B2 F4 ...     in flight: min(m, p - s)
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ...

Source: Narayanan et al., PipeDream, SOSP 2019 and the flushed form of Fan et al., DAPPLE, PPoPP
2021; where links are slow more micro-batches than theirs may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.chain import require_chain
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import with_instructions
from bigbrain_fx.planning import Ranked, one_f_one_b, zb_h1


@dataclass(frozen=True)
class OneForwardOneBackward:
    """Alternate forwards and backwards; needs one stage per device.

    `in_flight[s]` is the most micro-batches that stage s holds between their forward and their
    backward; None is the classic p - s. The steady cycle is at least
    sum over j >= s of (t_j + round trip_j) / in_flight[s].
    """

    name: str = "1f1b"
    in_flight: tuple[int, ...] | None = None
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(one_f_one_b)

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
        _require_falling(in_flight, trained)
        return with_instructions(stages, self.ranked(count, micro_batches, in_flight), trained)


@dataclass(frozen=True)
class ZeroBubbleH1(OneForwardOneBackward):
    """ZB-H1: 1F1B whose backwards are split; gradients of weights fill the gaps at a step's end.

      stage 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 ...  f = b = w, p = 4, M = 8: 27 units,
      stage 1  .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 ...  where 1F1B takes 33 and 24 are work
      stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 ...
      stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 ...  in memory: p micro-batches at most

    Stage s has p - s micro-batches between forward and backward, as with 1F1B, and s more between
    backward and W. It knows nothing of messages, times or bytes.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2, in the order of
    torch.distributed.pipelining's ScheduleInterleavedZeroBubble with one stage a device.
    """

    name: str = "zb-h1"
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(zb_h1)


def _require_falling(in_flight: tuple[int, ...], trained: frozenset[int]) -> None:
    """Raise when a stage would wait for more micro-batches than an earlier one lets out."""
    waiting = sorted(trained)
    for earlier, later in pairwise(waiting):
        if in_flight[earlier] < in_flight[later]:
            raise InputError(
                f"in_flight must not grow along the chain, but stage {earlier} has "
                f"{in_flight[earlier]} and stage {later} has {in_flight[later]}",
                code="BX1314",
                notes=(
                    f"stage {later} would wait for a micro-batch that stage {earlier} holds back",
                ),
                help=f"give stage {earlier} at least {in_flight[later]}",
            )
