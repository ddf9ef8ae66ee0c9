"""How many micro-batches must be in flight to keep the pipeline's slowest part busy."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import ceil

from bigbrain_fx.planning.clock import TimedStages
from bigbrain_fx.planning.listing import stays_s
from bigbrain_fx.planning.virtual_stages import VirtualStages


def in_flight_to_fill(
    stages: TimedStages, micro_batches: int, untrained: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Return how many micro-batches each device needs in flight to keep the slowest one busy.

    Little's law: the time that one micro-batch, alone, stays on the device (first forward to last
    backward), over the time between two micro-batches at the slowest device or link. On a chain
    each hop is rounded up on its own, since 1F1B alternates in lockstep: p equal stages with free
    links get p - s, as in classic 1F1B, and the numbers never grow, so that `1f1b` takes them. With
    several stages per device micro-batches queue for one another, and one more is let in.

    Returns:
        One number per device, from 1 to `micro_batches`, in the order of `stages.devices`.
    """
    cycle_s = _busiest_s(stages, untrained)
    if cycle_s <= 0.0:
        return (micro_batches,) * len(stages.devices)
    alone_s = stays_s(VirtualStages.unsplit(stages, 1, untrained))
    each_s = [alone_s[device] for device in stages.devices]
    if stages.is_chain:
        hops_s = [a - b for a, b in pairwise((*each_s, 0.0))]
        counts = [sum(_rounds(hop_s, cycle_s) for hop_s in hops_s[i:]) for i in range(len(hops_s))]
    else:
        counts = [_rounds(stay_s, cycle_s) + 1 for stay_s in each_s]
    return tuple(max(1, min(micro_batches, count)) for count in counts)


def _rounds(time_s: float, cycle_s: float) -> int:
    """Return how many cycles it takes, at least 0; a rounding error does not count as a cycle."""
    return max(0, ceil(time_s / cycle_s - 1e-9))


def _busiest_s(stages: TimedStages, untrained: frozenset[int]) -> float:
    """Return the most seconds of work that a micro-batch brings to any device or link."""
    loads: dict[tuple[int, int], float] = defaultdict(float)
    for stage, device in enumerate(stages.device_of):
        loads[device, device] += stages.forward_s[stage]
        loads[device, device] += 0.0 if stage in untrained else stages.backward_s[stage]
    for message in (*stages.values, *stages.gradients):
        if stages.crosses(message):
            ends = stages.device_of[message.source], stages.device_of[message.target]
            loads[ends] += message.wire_s
    return max(loads.values())
