"""The list scheduler on arrays: a device that is free takes the most urgent job that is ready.

The physics is that of `plan.simulate`: a message starts when its link is free, and latency does not
occupy the link. Priorities: a backward before a forward, an early micro-batch before a late one,
and of one micro-batch the stage with the longest way still to go. A device has at most its limit of
micro-batches on it, from their first to their last computation there. That cannot block:
micro-batches enter every stage in ascending order, so the earliest unfinished one was let in
everywhere before any later one.

Source: Graham, Bounds on Multiprocessing Timing Anomalies, 1969 (list scheduling); the rank is the
upward rank of HEFT (Topcuoglu et al., 2002), used here only among equals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from heapq import heappop, heappush

from bigbrain_fx.planning.clock import Job, Message, Orders, TimedStages


class Play:
    """One training step, played through in time: mutable, used once.

    Args:
        staged: the stages.
        micro_batches: per step.
        limits: device -> the most micro-batches on it at once.
        untrained: stages that have no backward.
    """

    def __init__(
        self,
        staged: TimedStages,
        micro_batches: int,
        limits: Mapping[int, int],
        untrained: frozenset[int] = frozenset(),
    ) -> None:
        self.staged, self.micro_batches, self.limits = staged, micro_batches, limits
        self.untrained = untrained
        self._out: dict[bool, dict[int, list[Message]]] = {True: {}, False: {}}
        self._inputs: dict[bool, dict[int, int]] = {True: {}, False: {}}
        for way, messages in ((True, staged.values), (False, staged.gradients)):
            for message in messages:
                self._out[way].setdefault(message.source, []).append(message)
                self._inputs[way][message.target] = self._inputs[way].get(message.target, 0) + 1
        self._ranks = self._upward()
        self._missing: dict[Job, int] = {}
        self._heaps: dict[tuple[bool, int], list[tuple[int, float, int]]] = defaultdict(list)
        self._running: set[int] = set()
        self._inside: dict[int, dict[int, int]] = {d: {} for d in staged.devices}
        self._work = dict.fromkeys(staged.devices, 0)
        for stage, device in enumerate(staged.device_of):
            self._work[device] += 1 if stage in untrained else 2
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, Job, bool]] = []
        self._serial = 0
        self._done: dict[int, list[Job]] = {d: [] for d in staged.devices}
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}

    def orders(self) -> Orders:
        """Play it through; afterwards `first_s` and `last_s` say when each device was at work."""
        for stage in range(len(self.staged.device_of)):
            if not self._waits_for((True, stage, 0)):
                self._offer((True, stage, 0))
        for device in self.staged.devices:
            self._start(device, 0.0)
        while self._events:
            now_s = self._events[0][0]
            touched: dict[int, None] = {}  # everything of one moment happens before anyone decides
            while self._events and self._events[0][0] == now_s:
                _, _, job, is_done = heappop(self._events)
                touched[self.staged.device_of[job[1]]] = None
                (self._finish if is_done else self._supply)(job, now_s)
            for device in touched:
                self._start(device, now_s)
        return self._done

    def _upward(self) -> dict[bool, list[float]]:
        """Return each stage's longest way to the end of the step, from its forward or backward."""
        staged = self.staged
        count = len(staged.device_of)
        back = [0.0] * count
        for stage in (stage for stage in range(count) if stage not in self.untrained):
            ways = (m.way_s + back[m.target] for m in self._out[False].get(stage, ()))
            back[stage] = staged.backward_s[stage] + max(ways, default=0.0)
        there = list(back)
        for stage in reversed(range(count)):
            ways = (m.way_s + there[m.target] for m in self._out[True].get(stage, ()))
            own_s = staged.forward_s[stage]
            there[stage] = max(own_s + max(ways, default=0.0), own_s + back[stage])
        return {True: there, False: back}

    def _waits_for(self, job: Job) -> int:
        is_forward, stage, micro = job
        own = 0 if is_forward else 1
        return int(micro > 0) + own + self._inputs[is_forward].get(stage, 0)

    def _supply(self, job: Job, now_s: float) -> None:
        left = self._missing.pop(job, None)
        left = (self._waits_for(job) if left is None else left) - 1
        if left:
            self._missing[job] = left
        else:
            self._offer(job)

    def _offer(self, job: Job) -> None:
        is_forward, stage, micro = job
        heap = self._heaps[is_forward, self.staged.device_of[stage]]
        heappush(heap, (micro, -self._ranks[is_forward][stage], stage))

    def _start(self, device: int, now_s: float) -> None:
        if device in self._running:
            return
        job = self._take(device)
        if job is None:
            return
        is_forward, stage, micro = job
        took_s = (self.staged.forward_s if is_forward else self.staged.backward_s)[stage]
        self._running.add(device)
        self._inside[device].setdefault(micro, self._work[device])
        self._done[device].append(job)
        self.first_s.setdefault(device, now_s)
        self.last_s[device] = now_s + took_s
        self._at(now_s + took_s, job, is_done=True)

    def _take(self, device: int) -> Job | None:
        backwards, forwards = self._heaps[False, device], self._heaps[True, device]
        if backwards:
            micro, _, stage = heappop(backwards)
            return False, stage, micro
        inside = self._inside[device]
        # if the earliest may not come in yet, no later one is in
        if forwards and (forwards[0][0] in inside or len(inside) < self.limits[device]):
            micro, _, stage = heappop(forwards)
            return True, stage, micro
        return None

    def _finish(self, job: Job, now_s: float) -> None:
        is_forward, stage, micro = job
        device = self.staged.device_of[stage]
        self._running.remove(device)
        self._inside[device][micro] -= 1
        if not self._inside[device][micro]:
            del self._inside[device][micro]
        if micro + 1 < self.micro_batches:
            self._supply((is_forward, stage, micro + 1), now_s)
        if is_forward and stage not in self.untrained:
            self._supply((False, stage, micro), now_s)
        for message in self._out[is_forward].get(stage, ()):
            reader = is_forward, message.target, micro
            self._at(self._arrival_s(message, now_s), reader, is_done=False)

    def _arrival_s(self, message: Message, now_s: float) -> float:
        a, b = self.staged.device_of[message.source], self.staged.device_of[message.target]
        if a == b:
            return now_s
        free_s = max(now_s, self._link_free_s.get((a, b), 0.0)) + message.wire_s
        self._link_free_s[a, b] = free_s
        return free_s + message.latency_s

    def _at(self, when_s: float, job: Job, *, is_done: bool) -> None:
        self._serial += 1
        heappush(self._events, (when_s, self._serial, job, is_done))
