"""ZB-V and DualPipe-V: two pieces a device in a V, backwards split in two.

    device 0  stages 0, 3      the last piece is where the first one is: its gradients need not come
    device 1  stages 1, 2      far, and BackwardWeights fill what is left of the gaps

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024; DeepSeek, DualPipe, 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import require_line, with_instructions
from bigbrain_fx.planning import Ranked, dualpipe_v, v_line, zb_v


@dataclass(frozen=True)
class ZeroBubbleV:
    """ZB-V: 1F1B's memory, and no bubble between equal stages of steps in a row."""

    name: str = "zb-v"
    in_flight: tuple[int, ...] | None = None
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(zb_v)

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: the stages are no V, fewer micro-batches than it takes, or `in_flight` is
                given.
        """
        devices = len(stages.devices)
        require_line(self.name, stages, v_line(devices), self.in_flight)
        return with_instructions(stages, self.ranked(devices, micro_batches), trained)


@dataclass(frozen=True)
class DualPipeV(ZeroBubbleV):
    """DualPipe-V, whose Forwards and Backwards go one after another here."""

    name: str = "dualpipe-v"
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(dualpipe_v)
