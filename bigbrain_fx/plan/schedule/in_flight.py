"""How many micro-batches must be in flight to keep the pipeline's slowest part busy."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from bigbrain_fx.core import Stages
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.greedy import play


def in_flight_to_fill(
    stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
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
    cycle_s = max(_loads_s(stages, costs, trained))
    if cycle_s == 0.0:
        return (micro_batches,) * len(stages.devices)
    alone = play(stages, 1, costs, trained, dict.fromkeys(stages.devices, 1))
    stays_s = [alone.last_end_s[d] - alone.first_start_s[d] for d in stages.devices]
    if stages.is_chain:
        hops_s = [a - b for a, b in pairwise((*stays_s, 0.0))]
        counts = [sum(_rounds(hop_s, cycle_s) for hop_s in hops_s[i:]) for i in range(len(hops_s))]
    else:
        counts = [_rounds(stay_s, cycle_s) + 1 for stay_s in stays_s]
    return tuple(max(1, min(micro_batches, count)) for count in counts)


def _rounds(time_s: float, cycle_s: float) -> int:
    """Return how many cycles it takes, at least 0; a rounding error does not count as a cycle."""
    return max(0, ceil(time_s / cycle_s - 1e-9))


def _loads_s(stages: Stages, costs: StageCosts, trained: frozenset[int]) -> list[float]:
    """Return the seconds of work that one micro-batch brings to each device and to each link."""
    loads: dict[tuple[str, str], float] = {}
    for stage in stages.stages:
        here = stage.device, stage.device
        backward_s = costs.backward_s[stage.index] if stage.index in trained else 0.0
        loads[here] = loads.get(here, 0.0) + costs.forward_s[stage.index] + backward_s
    for edge in stages.edges:
        goes = edge.kind == "activation" or (edge.kind == "gradient" and bool(trained))
        if goes and not stages.is_local(edge):
            ends = stages.stages[edge.source].device, stages.stages[edge.target].device
            loads[ends] = loads.get(ends, 0.0) + costs.wire_s(stages, edge)[0]
    return list(loads.values())
