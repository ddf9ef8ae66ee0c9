"""1F1B on a chain of stages -> when the last device is done.

The physics, and the bits, are those of `clock.played_s`, which follows one device after another.
Where many stages compute at once, all of them go in step, in arrays: in a round each takes its next
job where what it waits for is there, and hundreds of stages take about as long as a few. It knows
chains alone, whose neighbours send each other one message each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from bigbrain_fx.planning.clock import Message, TimedStages
from bigbrain_fx.planning.unit_work import Array, Numbers

_FEWEST_JOBS = 16
"""Of a round, about, from which on arrays are faster than following each device."""


class ChainClock:
    """One step of a chain in simulated time: mutable, used once.

    Args:
        stages: one per device, and `is_plain`.
        micro_batches: of the step.
        in_flight: of each stage.
    """

    def __init__(self, stages: TimedStages, micro_batches: int, in_flight: Numbers) -> None:
        count = len(stages.forward_s)
        self.micro_batches = micro_batches
        self.warm_up = np.minimum(in_flight, micro_batches)
        self.now_s = np.array([stages.begin_s[stage] for stage in range(count)])
        self.done = {way: np.zeros(count + 2, dtype=np.intp) for way in (True, False)}
        for way in self.done:  # beside the ends everything is there
            self.done[way][[0, -1]] = micro_batches
        self.job_s = {way: np.array(stages.job_s[way]) for way in (True, False)}
        self.ways = {True: _Way(stages.values, count, micro_batches, 1)}
        self.ways[False] = _Way(stages.gradients, count, micro_batches, -1)

    def step_s(self, once_s: Array) -> float:
        """Return when the last device is done."""
        while self._round():
            pass
        return float((self.now_s + once_s).max())

    def _round(self) -> bool:
        """Let each stage take its next job, where it can; return whether one did."""
        there, back = self.done[True], self.done[False]
        forward, backward = there[1:-1], back[1:-1]
        is_forward = (forward < self.micro_batches) & (forward - backward < self.warm_up)
        forwards = np.flatnonzero(is_forward & (there[:-2] > forward))
        backwards = np.flatnonzero(~is_forward & (back[2:] > backward))
        for way, ready in ((True, forwards), (False, backwards)):
            if len(ready):
                self._take(way, ready)
        return bool(len(forwards) or len(backwards))

    def _take(self, way: bool, ready: Numbers) -> None:
        own, done = self.ways[way], self.done[way]
        micro = done[ready + 1]
        now_s = np.maximum(self.now_s[ready], own.arrived_s[ready, micro]) + own.received_s[ready]
        now_s += self.job_s[way][ready]
        now_s += own.sent_s[ready]
        self.now_s[ready] = now_s
        own.send(ready, micro, now_s)
        done[ready + 1] += 1


class _Way:
    """The messages of one direction: what each stage takes and sends, and when that is there."""

    def __init__(self, every: tuple[Message, ...], count: int, micro: int, step: int) -> None:
        self.step = step
        self.received_s, self.sent_s, self.wire_s, self.latency_s, self.free_s = np.zeros(
            (5, count)
        )
        # one row more: the last of a direction sends nobody anything
        self.arrived_s = np.full((count + 1, micro), -np.inf)
        for message in every:
            self.received_s[message.target] = message.received_s
            self.sent_s[message.source] = message.sent_s
            self.wire_s[message.source] = message.wire_s
            self.latency_s[message.source] = message.latency_s

    def send(self, ready: Numbers, micro: Numbers, now_s: Array) -> None:
        """Send what these stages made: the first and the last of a chain have one neighbour."""
        self.free_s[ready] = np.maximum(now_s, self.free_s[ready]) + self.wire_s[ready]
        targets = ready + self.step  # -1 and the end are the row that nobody reads
        self.arrived_s[targets, micro] = self.free_s[ready] + self.latency_s[ready]


def many_at_once(stages: TimedStages, micro_batches: int, in_flight: Sequence[int]) -> bool:
    """Whether many stages of a chain compute at once.

    They do not where neighbours have equally many in flight: then a forward goes through all of
    these before any of them goes on to its next backward. Nor where few are in flight: a
    micro-batch stays at a stage for two rounds of each stage from there on.
    """
    count = len(stages.forward_s)
    if count < _FEWEST_JOBS:
        return False
    alike = max((len(list(run)) for n, run in groupby(in_flight) if n < micro_batches), default=1)
    waits = (2 * (count - s) * micro_batches / n for s, n in enumerate(in_flight))
    rounds = max(2 * (count + micro_batches), 2 * alike * micro_batches, *waits)
    return 2 * count * micro_batches >= _FEWEST_JOBS * rounds


def is_plain(stages: TimedStages) -> bool:
    """Whether each stage is on a device of its own and neighbours send each other one message."""
    hops = [(stage, stage + 1) for stage in range(len(stages.forward_s) - 1)]
    there = [(message.source, message.target) for message in stages.values]
    back = [(message.target, message.source) for message in stages.gradients]
    return (
        stages.device_of == tuple(range(len(hops) + 1))
        and sorted(there) == hops
        and sorted(back) == hops
    )
