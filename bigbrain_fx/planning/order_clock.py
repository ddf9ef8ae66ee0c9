"""One pipeline, made ready so that thousands of orders of it can be played: seconds of each.

The physics is that of `clock.played_s`, with jobs as numbers. A step in a row is played as devices
run it where nothing is clipped: the next begins on each when its own program ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from bigbrain_fx.planning.clock import Message
from bigbrain_fx.planning.virtual_stages import JobOf, Kind, VirtualStages

MOST_STEPS = 6
"""In a row, until a period is taken for what the last of them took."""
_ALIKE = 1e-9


class OrderClock:
    """Plays orders of one pipeline.

    An order is a list of numbers of jobs; the orders of all devices are a list in the order of
    `devices`. `played` counts the jobs that were played: the work of a search.
    """

    def __init__(self, stages: VirtualStages) -> None:
        self.stages, self.played = stages, 0
        self.devices = stages.timed.devices
        self._micros = stages.micro_batches
        self.count = sum(len(stages.kinds(stage)) for stage in range(stages.count)) * self._micros
        numbers = range(len(Kind) * stages.count * self._micros)
        each = [divmod(job // self._micros, stages.count) for job in numbers]
        self.cost_s = [stages.job_s[kind][stage] for kind, stage in each]
        self.bytes = [stages.change_bytes(kind, stage) for kind, stage in each]
        self._needs: list[list[tuple[int, float]]] = [[] for _ in numbers]
        self._sends: list[list[tuple[int, int, float, float, float]]] = [[] for _ in numbers]
        self._slots = self._links = 0
        self._wire()
        timed = stages.timed
        self._begin_s = [timed.begin_s[device] for device in self.devices]
        self._once_s = [timed.once_s[device] for device in self.devices]
        room = [stages.memory_bytes.get(device, float("inf")) for device in self.devices]
        self.room = [most * (1 + _ALIKE) for most in room]

    def _wire(self) -> None:
        links: dict[tuple[int, int], int] = {}
        timed = self.stages.timed
        for kind, messages in ((Kind.FORWARD, timed.values), (Kind.BACKWARD, timed.gradients)):
            for message in filter(timed.crosses, messages):
                ends = timed.device_of[message.source], timed.device_of[message.target]
                self._add(kind, message, links.setdefault(ends, len(links)))
        self._links = len(links)

    def _add(self, kind: Kind, message: Message, link: int) -> None:
        for micro in range(self._micros):
            slot = self._slots + micro
            reader = self.number((kind, message.target, micro))
            self._needs[reader].append((slot, message.received_s))
            way = slot, link, message.sent_s, message.wire_s, message.latency_s
            self._sends[self.number((kind, message.source, micro))].append(way)
        self._slots += self._micros

    def number(self, job: JobOf) -> int:
        """Return a job's number."""
        kind, stage, micro = job
        return (int(kind) * self.stages.count + stage) * self._micros + micro

    def numbered(self, orders: Mapping[int, Sequence[JobOf]]) -> list[list[int]]:
        """Return orders as numbers."""
        return [list(map(self.number, orders[device])) for device in self.devices]

    def fits(self, device: int, jobs: Sequence[int]) -> bool:
        """Whether what the device of this place holds always has room."""
        return max(accumulate(map(self.bytes.__getitem__, jobs)), default=0.0) <= self.room[device]

    def all_fit(self, orders: Sequence[Sequence[int]]) -> bool:
        """Whether what every device holds always has room."""
        return all(self.fits(device, jobs) for device, jobs in enumerate(orders))

    def step_s(self, orders: Sequence[Sequence[int]]) -> float:
        """Return the seconds of a step alone; infinity where devices wait for each other."""
        end_s, free_s = list(self._begin_s), [0.0] * self._links
        if not self._follow(orders, end_s, free_s):
            return float("inf")
        return max(end + once for end, once in zip(end_s, self._once_s, strict=True))

    def row_s(self, orders: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return the seconds of one more step in a row, and those of a step alone."""
        end_s, free_s = list(self._begin_s), [0.0] * self._links
        alone_s = 0.0
        before: list[float] = []
        for _ in range(MOST_STEPS):
            if not self._follow(orders, end_s, free_s):
                return float("inf"), float("inf")
            ends = [end + once for end, once in zip(end_s, self._once_s, strict=True)]
            alone_s = alone_s or max(ends)
            if before and _is_shifted(before, ends):
                break
            last, before = before, ends
            end_s = [end + begin for end, begin in zip(ends, self._begin_s, strict=True)]
        else:
            return max(before) - max(last), alone_s
        return ends[0] - before[0], alone_s

    def _follow(
        self, orders: Sequence[Sequence[int]], end_s: list[float], free_s: list[float]
    ) -> bool:
        """Follow every device through its jobs; whether all came to their end."""
        arrived_s, waiting = [-1.0] * self._slots, [-1] * self._slots
        needs, sends, cost_s = self._needs, self._sends, self.cost_s
        done = [0] * len(orders)
        pending = list(reversed(range(len(orders))))
        while pending:
            device = pending.pop()
            end, at = end_s[device], done[device]
            for job in orders[device][at:]:
                now = end
                for slot, received_s in needs[job]:
                    there_s = arrived_s[slot]
                    if there_s < 0.0:
                        waiting[slot] = device
                        break
                    now = (there_s if there_s > now else now) + received_s
                else:
                    now += cost_s[job]
                    for slot, link, sent_s, wire_s, latency_s in sends[job]:
                        now += sent_s
                        free = free_s[link]
                        free = free_s[link] = (now if now > free else free) + wire_s
                        arrived_s[slot] = free + latency_s
                        if waiting[slot] >= 0:
                            pending.append(waiting[slot])
                            waiting[slot] = -1
                    end = now
                    at += 1
                    continue
                break
            end_s[device], done[device] = end, at
        self.played += self.count
        return done == [len(jobs) for jobs in orders]


def _is_shifted(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether every device ended its step just as much later than the step before."""
    by = after[0] - before[0]
    return all(abs(b - a - by) <= _ALIKE * b for a, b in zip(before, after, strict=True))
