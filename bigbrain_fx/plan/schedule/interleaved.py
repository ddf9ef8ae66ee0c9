"""Interleaved 1F1B: devices have several pieces of the model each, round and round.

    device 0  stages 0, 2      the bubble is that of 1F1B divided by the pieces of a device, and
    device 1  stages 1, 3      every link is crossed as often as there are pieces

Source: Narayanan et al., Efficient Large-Scale Language Model Training, SC 2021, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import require_line, with_instructions
from bigbrain_fx.planning import interleaved, loop_line


@dataclass(frozen=True)
class Interleaved:
    """Alternate forwards and backwards over stages that go round the devices."""

    name: str = "interleaved"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: the stages do not go round the devices, the micro-batches make no even
                rounds, or `in_flight` is given.
        """
        devices = len(stages.devices)
        pieces = max(2, len(stages.stages) // devices)
        require_line(self.name, stages, loop_line(devices, pieces), self.in_flight)
        return with_instructions(stages, interleaved(devices, micro_batches, pieces), trained)
