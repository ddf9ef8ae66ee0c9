"""GEMS: two replicas on the same devices, one in reverse, take micro-batches in turn.

    device 0  F0 .  .  B0 == f1 b1 == .  .  F2 ...     step = p f + M p b + (M - 1) f where b >= f
    device 1  .  F0 B0 == f1 .  .  .  b1 == .  ...     held: one micro-batch on each device

A forward of one replica follows the other's backward through the devices, so that it takes no time
but on the last of them. A device has weights of two stages, s and p - 1 - s, and lets go of one
micro-batch's activations before it makes the next one's.

Source: Jain et al., GEMS, SC 2020: MAST is two micro-batches, MASTER more of them, HY several
groups of devices that each have two such replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigbrain_fx.core import Backward, Compute, Forward, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders


@dataclass(frozen=True)
class Gems:
    """Run one micro-batch after the other on each device, forward and backward, of two replicas."""

    name: str = "gems"
    in_flight: tuple[int, ...] | None = None

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order; `stages` are those of all replicas.

        Raises:
            InputError: the replicas do not lie on the same devices in reverse, or have unequal
                numbers of micro-batches; or `in_flight` is given.
        """
        if self.in_flight is not None:
            raise InputError(
                "schedule 'gems' has one micro-batch in flight on each device",
                code="BX1310",
                help="use --schedule 1f1b, or leave in_flight out",
            )
        _require_mirrored(stages)
        return {
            device: tuple(_in_turn(stages, device, micro_batches, trained))
            for device in stages.devices
        }


def is_mirrored(stages: Stages) -> bool:
    """Whether each two replicas lie on the same devices, one in reverse, one stage of each."""
    lines = [[s.device for s in stages.of_replica(n)] for n in range(stages.replicas)]
    pairs = zip(lines[::2], lines[1::2], strict=False)
    return len(lines) % 2 == 0 and all(_are_opposite(*pair) for pair in pairs)


def _are_opposite(line: list[str], back: list[str]) -> bool:
    """Whether no device has the same place in both: it would hold each of its weights twice."""
    return back == line[::-1] and len(set(line)) == len(line) and len(line) % 2 == 0


def _require_mirrored(stages: Stages) -> None:
    if not is_mirrored(stages):
        found = " ".join(f"{stage.device}" for stage in stages.stages)
        raise InputError(
            "schedule 'gems' needs two replicas on one line of an even number of devices, the "
            f"second in reverse, and stages are on {found}",
            code="BX1311",
            help="split with --schedule gems, a partitioner that makes a line, and an even number "
            "of devices, or use --schedule 1f1b",
        )
    counts = [len(own) for own in stages.micros]
    if len(set(counts)) > 1:
        raise InputError(
            "schedule 'gems' takes micro-batches in turn, and replicas have "
            f"{', '.join(map(str, counts))}",
            code="BX1312",
            help=f"use a number of micro-batches that {stages.replicas} divides",
        )


def _in_turn(
    stages: Stages, device: str, micro_batches: int, trained: frozenset[int]
) -> Iterator[Compute]:
    """Yield forward and backward of each micro-batch of a device, by number."""
    own = (stage.index for stage in stages.of(device))
    runs = ((micro, stage) for stage in own for micro in stages.micros_of(stage, micro_batches))
    for micro, stage in sorted(runs):
        yield Forward(stage, micro)
        if stage in trained:
            yield Backward(stage, micro)
