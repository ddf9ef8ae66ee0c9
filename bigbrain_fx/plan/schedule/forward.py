"""Forward only: micro-batches stream through the stages, for inference.

It knows nothing of messages, times or memory.

    stage 0  F0 F1 F2 F3 .  .       batch = (m + p - 1) t
    stage 1  .  F0 F1 F2 F3 .       held: the micro-batch that runs, and what waits to be sent
    stage 2  .  .  F0 F1 F2 F3

A device with several stages takes them along the same diagonal: F(stage, micro) in the order of
stage + micro. An earlier stage of one micro-batch, and the same stage of an earlier one, stand on
an earlier diagonal, so that no order of devices can deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Forward, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders


@dataclass(frozen=True)
class ForwardOnly:
    """Stream micro-batches through any stage graph; there is no backward."""

    name: str = "forward"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: there are stages to train, or `in_flight` is given.
        """
        if trained:
            raise InputError(
                "schedule 'forward' has no backward, and this plan trains",
                code="BX1308",
                help="use --schedule 1f1b, gpipe or list, or split with --mode eval",
            )
        if self.in_flight is not None:
            raise InputError(
                "schedule 'forward' keeps nothing in flight and takes no in_flight",
                code="BX1309",
                help="leave in_flight out",
            )
        return {device: _diagonal(stages, device, micro_batches) for device in stages.devices}


def _diagonal(stages: Stages, device: str, micro_batches: int) -> tuple[Forward, ...]:
    own = [stage.index for stage in stages.of(device)]
    cells = [(stage + micro, stage, micro) for stage in own for micro in range(micro_batches)]
    return tuple(Forward(stage, micro) for _, stage, micro in sorted(cells))
