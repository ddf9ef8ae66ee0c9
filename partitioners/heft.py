"""Jobs -> a device for each: the longest way to the end first, where it can finish earliest.

It knows arrays and a question, "is there room?"; it knows no graph and no cluster.

Source: HEFT (Topcuoglu, Hariri, Wu, IEEE TPDS 13, 2002), with insertion into gaps; memory is asked
for job by job, which HEFT does not do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partitioners.jobs import Jobs, Room

Times = NDArray[np.float64]


def heft(jobs: Jobs, room: Room) -> tuple[int, ...]:
    """Return the device of every job; -1 from the first on that fits nowhere."""
    run = _HeftRun(jobs, room)
    ranks = upward_ranks(jobs)
    for job in sorted(range(jobs.times.shape[1]), key=lambda job: (-ranks[job], job)):
        if not run.place(job):
            break
    return tuple(run.homes)


def upward_ranks(jobs: Jobs) -> Times:
    """Return each job's longest way to the end, with mean times of jobs and of moves."""
    finite = np.isfinite(jobs.times)
    sums = np.where(finite, jobs.times, 0.0).sum(axis=0)
    ranks: Times = sums / np.maximum(finite.sum(axis=0), 1)
    readers: list[list[tuple[int, float]]] = [[] for _ in ranks]
    moves_s = [_mean_move_s(jobs, value) for value in range(len(jobs.makers))]
    for job, values in enumerate(jobs.reads):
        for before in jobs.after[job]:
            readers[before].append((job, 0.0))
        for value in values:
            readers[jobs.makers[value]].append((job, moves_s[value]))
    for job in range(len(ranks) - 1, -1, -1):
        ranks[job] += max((move_s + ranks[later] for later, move_s in readers[job]), default=0.0)
    return ranks


def _mean_move_s(jobs: Jobs, value: int) -> float:
    devices = range(len(jobs.times))
    pairs = [(a, b) for a in devices for b in devices if a != b]
    return sum(jobs.move(value, a, b) for a, b in pairs) / max(1, len(pairs))


class _HeftRun:
    """Devices with what is on them already: mutable, used once."""

    def __init__(self, jobs: Jobs, room: Room) -> None:
        self.jobs, self.room = jobs, room
        devices, count = jobs.times.shape
        self.homes = [-1] * count
        self._end = [0.0] * count
        self._busy: list[list[tuple[float, float]]] = [[] for _ in range(devices)]

    def place(self, job: int) -> bool:
        """Place a job whose inputs are placed; False when it fits nowhere."""
        devices = range(len(self._busy))
        starts = [self._start(job, device) for device in devices]
        takes = self.jobs.times[:, job]
        by_end = sorted(devices, key=lambda d: (starts[d] + takes[d], d))
        device = next((d for d in by_end if np.isfinite(takes[d]) and self.room.fits(job, d)), None)
        if device is None:
            return False
        self.homes[job] = device
        self._end[job] = starts[device] + float(takes[device])
        self._busy[device].append((starts[device], self._end[job]))
        self._busy[device].sort()
        self.room.take(job, device)
        return True

    def _start(self, job: int, device: int) -> float:
        """Return the earliest start in a gap that is long enough, once the inputs are there."""
        ready, takes = self._ready(job, device), float(self.jobs.times[device, job])
        for start, end in self._busy[device]:
            if ready + takes <= start:
                break
            ready = max(ready, end)
        return ready

    def _ready(self, job: int, device: int) -> float:
        found = max((self._end[before] for before in self.jobs.after[job]), default=0.0)
        for value in self.jobs.reads[job]:
            maker = self.jobs.makers[value]
            if self.homes[maker] != device:
                move_s = self.jobs.move(value, self.homes[maker], device)
                found = max(found, self._end[maker] + move_s)
        return found
