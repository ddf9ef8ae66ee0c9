"""List scheduling of jobs on devices that send to each other: earliest start first, with memory.

This is the rule behind `m_etf` and `m_sct`. A job runs once, without a pipeline. The module works
on arrays and asks "is there free memory?"; it does not know graphs or clusters.

Source: Baechi (Jeon et al., SoCC'20), sections 3.2 and 3.3; ETF is Hwang et al., SIAM J. Comput.
18 (1989); favorite children are Hanen and Munier, ETFA'95.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
_ROUNDING = 1e-12


class FreeMemory(Protocol):
    """Free memory of the devices; asked job by job, in the order of placement."""

    def has_room(self, unit: int, device: int) -> bool:
        """Whether a job fits besides what the device has."""
        ...

    def move(self, unit: int, to: int) -> None:
        """Put the job there."""
        ...


@dataclass(frozen=True)
class Jobs:
    """The jobs to place, numbered in an order in which they could run.

    Attributes:
        times: [device, job]; infinite where it cannot run.
        after: per job: the jobs that it waits for.
        makers: per value: the job that makes it.
        reads: per job: the values that it reads.
        move: (value, from, to) -> how long moving a value between two devices takes.
    """

    times: Times
    after: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    move: Callable[[int, int, int], float]


@dataclass(frozen=True)
class Timetable:
    """Device and times of every job; homes are -1 from the first job on that fits nowhere."""

    homes: tuple[int, ...]
    starts: tuple[float, ...]
    makespan: float


def timetable(
    jobs: Jobs, memory: FreeMemory, favorite: Mapping[int, int] | None = None
) -> Timetable:
    """Place, again and again, the ready job that can start first, on the device where it can.

    Of equal starts the earlier finish counts, then the lower job and device. A device has one
    channel to send and one to receive, each for one value at a time; a value that was received
    stays. With favorite children, a device that has just run a job stays free for that job's
    favorite, if that could start no earlier elsewhere. Only jobs that could have started anywhere
    by then may come between.
    """
    run = _JobRun(jobs, memory, favorite or {})
    while run.ready and run.place_next():
        pass
    return Timetable(tuple(run.homes), tuple(run.starts), float(run.free.max(initial=0.0)))


class _JobRun:
    """The state of one timetable in the making: mutable, used once."""

    def __init__(self, jobs: Jobs, memory: FreeMemory, favorite: Mapping[int, int]) -> None:
        self.jobs, self.memory, self.favorite = jobs, memory, favorite
        devices, count = jobs.times.shape
        self.homes, self.starts = [-1] * count, [0.0] * count
        self.free = np.zeros(devices)
        self.awake_for = [-1] * devices
        self._sending, self._receiving = np.zeros(devices), np.zeros(devices)
        self._arrived: dict[tuple[int, int], float] = {}  # (value, device) -> when
        self._arrival = np.zeros((count, devices))  # of the last input, for ready jobs
        self._waits = [len(set(before)) for before in jobs.after]
        self._next: list[list[int]] = [[] for _ in range(count)]
        for job, before in enumerate(jobs.after):
            for earlier in sorted(set(before)):
                self._next[earlier].append(job)
        self.ready: list[int] = [job for job in range(count) if not self._waits[job]]

    def place_next(self) -> bool:
        """Place the job that can start first; False when none fits anywhere."""
        ready = np.array(self.ready)
        starts = self._possible_starts(ready)
        while True:
            least = starts.min()
            if not np.isfinite(least):
                return False
            rows, devices = np.nonzero(starts <= least * (1 + _ROUNDING))
            ends = starts[rows, devices] + self.jobs.times[devices, ready[rows]]
            first = np.lexsort((devices, ready[rows], ends))[0]
            job, device = int(ready[rows[first]]), int(devices[first])
            if self.memory.has_room(job, device):
                break
            starts[rows[first], device] = np.inf
        self._place(job, device)
        return True

    def _possible_starts(self, ready: NDArray[np.intp]) -> Times:
        """Return [job, device]: the earliest start, where memory is not looked at."""
        arrival = self._arrival[ready]
        starts = np.maximum(arrival, self.free[None, :])
        starts[~np.isfinite(self.jobs.times.T[ready])] = np.inf
        anywhere = arrival.max(axis=1)  # from then on it could have started on any device
        for device, child in enumerate(self.awake_for):
            if child < 0 or not self._keeps(child, device):
                continue
            others = ready != child
            starts[others, device] = np.maximum(starts[others, device], anywhere[others])
        return starts

    def _keeps(self, child: int, device: int) -> bool:
        """Whether a device keeps itself free for a child: no other could start it earlier."""
        if self.homes[child] >= 0 or not self.memory.has_room(child, device):
            return False
        if self._waits[child]:
            return True  # what else it waits for is not known yet
        starts = np.maximum(self._arrival[child], self.free)
        return bool(starts[device] <= starts.min() * (1 + _ROUNDING))

    def _place(self, job: int, device: int) -> None:
        arrival, moved = self._inputs(job, device)
        touched = {device} if moved else set()
        for value, source, end in moved:
            self._arrived[value, device] = end
            self._sending[source] = max(self._sending[source], end)
            self._receiving[device] = max(self._receiving[device], end)
            touched.add(source)
        start = max(arrival, float(self.free[device]))
        self.homes[job], self.starts[job] = device, start
        self.free[device] = start + self.jobs.times[device, job]
        self.awake_for[device] = self.favorite.get(job, -1)
        self.memory.move(job, device)
        self.ready.remove(job)
        if touched:
            self._update(touched)
        for later in self._next[job]:
            self._waits[later] -= 1
            if not self._waits[later]:
                self.ready.append(later)
                for d in range(len(self.free)):
                    self._arrival[later, d] = self._inputs(later, d)[0]

    def _update(self, touched: set[int]) -> None:
        """Work out again when inputs arrive, for ready jobs that need a channel that was used."""
        for job in self.ready:
            sources = {self.homes[self.jobs.makers[value]] for value in self.jobs.reads[job]}
            again = range(len(self.free)) if sources & touched else sorted(touched)
            for device in again:
                self._arrival[job, device] = self._inputs(job, device)[0]

    def _inputs(self, job: int, device: int) -> tuple[float, list[tuple[int, int, float]]]:
        """Return when the last input is on a device, and what has to be moved: (value, from, end).

        Values are moved in the order in which they are made.
        """
        latest, moved = 0.0, []
        receiving, sending = float(self._receiving[device]), dict[int, float]()
        for before in self.jobs.after[job]:
            latest = max(latest, self._end(before))
        made = sorted((self._end(self.jobs.makers[value]), value) for value in self.jobs.reads[job])
        for end, value in made:
            source = self.homes[self.jobs.makers[value]]
            if source == device:
                continue
            if (value, device) in self._arrived:
                latest = max(latest, self._arrived[value, device])
                continue
            busy = sending.get(source, float(self._sending[source]))
            arrived = max(end, busy, receiving) + self.jobs.move(value, source, device)
            sending[source] = receiving = arrived
            latest = max(latest, arrived)
            moved.append((value, source, arrived))
        return latest, moved

    def _end(self, job: int) -> float:
        return self.starts[job] + float(self.jobs.times[self.homes[job], job])
