"""How long a chain of stages takes under 1F1B, and how many micro-batches to keep in flight.

A thousand splits can be compared in the time that one is simulated. Every plan that is returned
has been simulated as it is; this only chooses which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from operator import add

import numpy as np

from bigbrain_fx.planning.chain import Line, Split
from bigbrain_fx.planning.chain_clock import ChainClock, is_plain, many_at_once
from bigbrain_fx.planning.clock import Message, TimedStages, alternating, forwards, played_s
from bigbrain_fx.planning.cut_setting import Setting
from bigbrain_fx.planning.stages import Wires, messages


def chain_of(line: Line, split: Split, setting: Setting, again: Sequence[int]) -> TimedStages:
    """Return the stages that a split makes; stages `again` run their forward twice."""
    forward: list[float] = []
    backward: list[float] = []
    once: list[float] = []
    own = [setting.cluster.device[device].overheads for device in split.sequence]
    for stage, (device, a, b) in enumerate(
        zip(split.sequence, split.cuts[:-1], split.cuts[1:], strict=True)
    ):
        until_f, until_b, until_once = line.until(device)
        forward.append(float(until_f[b] - until_f[a]))
        twice_s = forward[-1] if stage in again else 0.0
        backward.append(float(until_b[b] - until_b[a]) + twice_s)
        once.append(float(until_once[b] - until_once[a]))
    stage_of = line.stage_of(split)
    values = line.between(stage_of)
    stages = tuple(range(len(own)))
    wires = Wires(setting.cluster, split.sequence)
    there, back = messages(values, line.work, stage_of, stages, wires)
    return TimedStages(
        stages,
        tuple(forward),
        tuple(backward) if line.work.trains else (0.0,) * len(own),
        _merged(there),
        _merged(back),
        {stage: each.step_s for stage, each in enumerate(own)},
        {stage: each.instruction_s for stage, each in enumerate(own)},
        dict(enumerate(once)),
    )


def _merged(every: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with those between the same two stages made one: they go one by one."""
    found: dict[tuple[int, int], list[Message]] = {}
    for message in every:
        found.setdefault((message.source, message.target), []).append(message)
    return tuple(
        Message(
            *ends,
            sum(m.nbytes for m in group),
            sum(m.wire_s for m in group),
            max(m.latency_s for m in group),
            sum(m.sent_s for m in group),
            sum(m.received_s for m in group),
        )
        for ends, group in found.items()
    )


def step_s(
    chain: TimedStages, micro_batches: int, in_flight: Sequence[int], trains: bool = True
) -> float:
    """Play a chain through one step of 1F1B and return when its last device is done.

    Args:
        chain: the stages.
        micro_batches: of the step.
        in_flight: of each stage; never more than the stage's before it.
        trains: otherwise there are only forwards.
    """
    if trains and is_plain(chain) and many_at_once(chain, micro_batches, in_flight):
        once_s = np.array([chain.once_s.get(stage, 0.0) for stage in chain.device_of])
        clock = ChainClock(chain, micro_batches, np.array(in_flight, dtype=np.intp))
        return clock.step_s(once_s)
    order = (
        alternating(chain, micro_batches, in_flight) if trains else forwards(chain, micro_batches)
    )
    return played_s(chain, order, trains)


def in_flights(
    chain: TimedStages, micro_batches: int, most: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield how many micro-batches each stage may keep in flight, each choice once.

    Classic 1F1B; as many as fill the pipeline (each hop's time there and back, in cycles of the
    slowest device or link, rounded up on its own), one more, two more; twice the classic; and all.

    Args:
        chain: the stages.
        micro_batches: of a step.
        most: what each stage's memory has room for.
    """
    count = len(chain.forward_s)
    classic = tuple(range(count, 0, -1))
    fill = _to_fill(chain, micro_batches)
    more = [tuple(n + extra * (n > 1) for n in fill) for extra in (1, 2)]
    twice = tuple(2 * n - 1 for n in classic)
    seen = set()
    for wanted in (classic, fill, *more, twice, (micro_batches,) * count):
        found = falling(wanted, micro_batches, most)
        if found not in seen:
            seen.add(found)
            yield found


def falling(wanted: Sequence[int], micro_batches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers within 1 .. micro_batches and `most`, none larger than the one before."""
    found, before = [], micro_batches
    for want, room in zip(wanted, most, strict=True):
        before = max(1, min(want, room, before))
        found.append(before)
    return tuple(found)


def _to_fill(chain: TimedStages, micro_batches: int) -> tuple[int, ...]:
    loads = list(map(add, *chain.job_s))
    hops = [_hop(chain, stage) for stage in range(len(loads) - 1)]
    cycle_s = max([*loads, *(busy_s for busy_s, _ in hops)])
    if cycle_s <= 0:
        return (micro_batches,) * len(loads)
    each = [
        load + hop for load, hop in zip(loads, [*(trip_s for _, trip_s in hops), 0.0], strict=True)
    ]
    rounds = [max(0, ceil(time_s / cycle_s - 1e-9)) for time_s in each]
    return tuple(max(1, sum(rounds[stage:])) for stage in range(len(rounds)))


def _hop(chain: TimedStages, stage: int) -> tuple[float, float]:
    """Return what a stage and the next send each other: of the busier way, and there and back."""
    there = [m for m in chain.values if (m.source, m.target) == (stage, stage + 1)]
    back = [m for m in chain.gradients if (m.source, m.target) == (stage + 1, stage)]
    wires = [sum(m.wire_s for m in way) for way in (there, back)]
    latency_s = sum(max((m.latency_s for m in way), default=0.0) for way in (there, back))
    handled_s = sum(m.received_s for m in (*there, *back))
    return max(wires), sum(wires) + latency_s + handled_s
