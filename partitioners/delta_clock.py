"""One micro-batch through a placement, and the busiest device or link: kept up to date by deltas.

Every unit is one job, forward and backward together, run on its device in the order of the facts; a
value goes to each device that reads it as soon as it is made, and its gradient comes back on the
same ticket. A move is simulated again only from the first unit on whose times it can change. Times
are whole picoseconds, so that no sum depends on the order of its terms and a delta equals a full
run exactly. It knows no memory and no stages.

Source: FlexFlow (Jia et al., MLSys'19), section 5.3, the delta simulation algorithm; here with
checkpoints of the devices' and links' times instead of a task graph that is patched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import Work

TICKS_PER_S = 10**12


@dataclass(frozen=True, slots=True)
class Ride:
    """What sending a value, and its gradient back, takes, in ticks.

    The wires are taken for `there` and `back`, for the longer of them (`busy`) before the next
    value leaves; the processes at both ends for `handling` each. `late` is how long after it began
    to leave a value may be used, its gradient's way included.
    """

    there: int
    back: int
    handling: int
    busy: int
    late: int


@dataclass(frozen=True)
class Timing:
    """What units and messages take.

    Attributes:
        known: the units; they run in this order.
        cluster: the devices, by number, and their links.
        micro_batches: per step; what happens once a step counts 1/micro_batches per micro-batch.
    """

    known: Work
    cluster: Cluster
    micro_batches: int

    @cached_property
    def unit_ticks(self) -> list[list[int]]:
        """[device][unit]: forward and backward, and its share of what is done once a step."""
        known = self.known
        return [
            [
                _ticks(float(s) + float(once_s) / self.micro_batches)
                for s, once_s in zip(known.seconds[d.name], known.once_s[d.name], strict=True)
            ]
            for d in self.cluster.devices
        ]

    @cached_property
    def made(self) -> list[list[int]]:
        """[unit]: the values that it makes."""
        return _by_unit(len(self.known.groups), ((v.maker,) for v in self.known.values))

    @cached_property
    def read(self) -> list[list[int]]:
        """[unit]: the values that it reads."""
        return _by_unit(len(self.known.groups), (v.readers for v in self.known.values))

    @cached_property
    def _rides(self) -> dict[tuple[int, int, int], Ride]:
        return {}

    def ride(self, value: int, a: int, b: int) -> Ride:
        """Return what sending a value from device a to device b takes."""
        found = self._rides.get((value, a, b))
        if found is None:
            found = self._rides[value, a, b] = self._ride(value, a, b)
        return found

    def _ride(self, number: int, a: int, b: int) -> Ride:
        value, ends = self.known.values[number], [self.cluster.devices[a], self.cluster.devices[b]]
        link = self.cluster.wire(ends[0].name, ends[1].name)
        sizes = [value.nbytes, *([value.gradient_bytes] if value.gradient_bytes else [])]
        handling = sum(_ticks(max(e.overheads.handling_s(n) for e in ends)) for n in sizes)
        wires = [_ticks(n / link.bytes_per_s) for n in sizes]
        late = sum(wires) + 2 * handling + len(sizes) * _ticks(link.latency_s)
        return Ride(wires[0], sum(wires[1:]), handling, max(wires), late)


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def _by_unit(count: int, units_of: Iterable[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for number, units in enumerate(units_of):
        for unit in units:
            found[unit].append(number)
    return found


class _Way(NamedTuple):
    """Where a value goes: the device, the number of the wire, and what the ride takes."""

    to: int
    wire: int
    ride: Ride


class DeltaClock:
    """The times of a placement, kept up to date move by move: mutable."""

    def __init__(self, timing: Timing, homes: Sequence[int]) -> None:
        self.timing, self.homes = timing, list(homes)
        self._makers = [value.maker for value in timing.known.values]
        self._readers = [value.readers for value in timing.known.values]
        self._count, self._devices = len(self.homes), len(timing.cluster.devices)
        self.device_ticks = [0] * self._devices  # one micro-batch's work on each
        self.link_ticks: dict[tuple[int, int], int] = {}
        self._goes: list[list[_Way]] = [[]] * len(self._makers)  # value -> to which devices, how
        for unit, home in enumerate(self.homes):
            self.device_ticks[home] += timing.unit_ticks[home][unit]
        for value in range(len(self._makers)):
            self._goes[value] = self._route(value)
            self._pay(value, 1)
        self._stride = max(1, isqrt(self._count))
        self._kept: list[tuple[list[int], list[int]]] = []  # before units 0, stride, ...
        self._arrives = [0] * (len(self._makers) * self._devices)
        self._changed, self._alone = 0, 0

    def move(self, unit: int, to: int) -> None:
        """Put a unit on another device."""
        at = self.homes[unit]
        if at == to:
            return
        touched = self.timing.made[unit] + self.timing.read[unit]
        for value in touched:
            self._pay(value, -1)
        self.homes[unit] = to
        self.device_ticks[at] -= self.timing.unit_ticks[at][unit]
        self.device_ticks[to] += self.timing.unit_ticks[to][unit]
        for value in touched:
            self._goes[value] = self._route(value)
            self._pay(value, 1)
        first = min((self._makers[value] for value in self.timing.read[unit]), default=unit)
        self._changed = min(self._changed, first, unit)

    def alone(self) -> int:
        """Return how long one micro-batch takes, alone, there and back."""
        if self._changed < self._count:
            self._run(self._changed // self._stride)
            self._changed = self._count
        return self._alone

    def most(self) -> int:
        """Return what the busiest device or link spends on one micro-batch."""
        return max(max(self.device_ticks, default=0), max(self.link_ticks.values(), default=0))

    def cost(self) -> int:
        """Return about what a step takes: one micro-batch alone, the others one every `most`."""
        return self.alone() + (self.timing.micro_batches - 1) * self.most()

    def _route(self, value: int) -> list[_Way]:
        """Return the ways of a value to each other device that reads it."""
        homes, devices = self.homes, self._devices
        here = homes[self._makers[value]]
        others = sorted({homes[reader] for reader in self._readers[value]} - {here})
        return [_Way(to, here * devices + to, self.timing.ride(value, here, to)) for to in others]

    def _pay(self, value: int, sign: int) -> None:
        """Add a value's messages to the loads, or take them off."""
        a, links = self.homes[self._makers[value]], self.link_ticks
        for b, _, ride in self._goes[value]:
            links[a, b] = links.get((a, b), 0) + sign * ride.there
            links[b, a] = links.get((b, a), 0) + sign * ride.back
            self.device_ticks[a] += sign * ride.handling
            self.device_ticks[b] += sign * ride.handling

    def _run(self, checkpoint: int) -> None:
        """Simulate from a checkpoint on."""
        free, wires = [0] * self._devices, [0] * self._devices**2
        if checkpoint:
            free, wires = list(self._kept[checkpoint][0]), list(self._kept[checkpoint][1])
        del self._kept[checkpoint:]
        for first in range(checkpoint * self._stride, self._count, self._stride):
            self._kept.append((list(free), list(wires)))
            self._run_units(first, min(first + self._stride, self._count), free, wires)
        self._alone = max(free, default=0)

    def _run_units(self, first: int, after: int, free: list[int], wires: list[int]) -> None:
        """Simulate some units; all that a walk spends its time on, so names are local here."""
        homes, makers, devices, arrives = self.homes, self._makers, self._devices, self._arrives
        takes, read, made, goes = (
            self.timing.unit_ticks,
            self.timing.read,
            self.timing.made,
            self._goes,
        )
        for unit in range(first, after):
            home = homes[unit]
            now = free[home]
            for value in read[unit]:
                if homes[makers[value]] != home and arrives[value * devices + home] > now:
                    now = arrives[value * devices + home]
            now += takes[home][unit]
            free[home] = now
            for value in made[unit]:
                for to, wire, ride in goes[value]:
                    leaves = max(now, wires[wire])
                    wires[wire] = leaves + ride.busy
                    arrives[value * devices + to] = leaves + ride.late
