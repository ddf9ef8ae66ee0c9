"""Whether a placement of any shape fits: the rule for pipelines and for scattered ops; a ledger.

A placement whose devices do not depend on each other in a circle becomes one stage per device, and
each stage holds what its place in the pipeline asks for. Any other becomes several stages per
device, and all micro-batches may be on every device. It knows no method and no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import AHEAD, InFlight, Work
from partitioners.footprint import Need, in_flight_by_device, needs


@dataclass(frozen=True)
class Room:
    """The memory of devices for one step of a graph.

    Attributes:
        known: the units.
        cluster: the devices; what they have is the limit.
        micro_batches: per step.
        in_flight: as in `footprint.in_flight_at` for a pipeline; scattered ops count the largest.
    """

    known: Work
    cluster: Cluster
    micro_batches: int
    in_flight: InFlight = None

    def fits(self, homes: Sequence[str]) -> bool:
        """Whether every device can hold its units."""
        return all(
            need.total <= self.cluster.device[device].memory_bytes
            for device, need in self.needs(homes).items()
        )

    def needs(self, homes: Sequence[str]) -> Mapping[str, Need]:
        """Return what each device in use holds at its worst moment."""
        if not homes:
            return {}
        if is_pipeline(self.known, homes):
            flights = in_flight_by_device(self.known, homes, self.micro_batches, self.in_flight)
            return needs(self.known, homes, flights)
        flights = dict.fromkeys(homes, self.scattered_flight)
        return needs(self.known, homes, flights, one_stage_each=False)

    @property
    def scattered_flight(self) -> int:
        """How many micro-batches a device with several stages may hold at once."""
        if self.in_flight is None:
            return self.micro_batches
        most = self.in_flight if isinstance(self.in_flight, int) else max(self.in_flight)
        return max(1, min(self.micro_batches, most))


def is_pipeline(known: Work, homes: Sequence[object]) -> bool:
    """Whether no device depends on itself through others."""
    return not _has_cycle({(homes[a], homes[b]) for a, b in known.edges if homes[a] != homes[b]})


def _has_cycle(edges: Iterable[tuple[object, object]]) -> bool:
    left = set(edges)
    while left:
        targets = {b for _, b in left}
        fewer = {(a, b) for a, b in left if a in targets}  # devices that wait for nobody go
        if len(fewer) == len(left):
            return True
        left = fewer
    return False


@dataclass(frozen=True)
class Bill:
    """What units bring to a device that has several stages, or some of it.

    Attributes:
        own: [device][unit]: what a unit adds by itself.
        work: [device][unit]: what it holds while it runs; the largest counts.
        shared: what any of these units brings, once: a weight, or a value made or received.
    """

    own: list[list[int]]
    work: list[list[int]]
    shared: list[tuple[tuple[int, ...], int]]

    @staticmethod
    def scattered(room: Room) -> Bill:
        """Return what `footprint.needs` counts when each unit may be a stage of its own."""
        known, flight = room.known, room.scattered_flight if room.known.trains else 1
        shared = []
        for weight in known.weights:
            trained = weight.trained_bytes * (1 + len(weight.readers) + known.state_per_byte)
            shared.append((weight.readers, weight.nbytes + int(trained)))
        for value in known.values:
            ahead = AHEAD * (value.nbytes + value.gradient_bytes)
            nbytes = flight * value.nbytes + 2 * value.gradient_bytes + ahead
            shared.append(((value.maker, *value.readers), nbytes))
        return Bill(_saved(room, known.kept(flight)), _work(room), shared)

    @staticmethod
    def at_least(room: Room) -> Bill:
        """Return what no placement holds less than: one micro-batch, and nothing sent."""
        known = room.known
        shared = [
            (weight.readers, weight.nbytes + int(weight.trained_bytes * (2 + known.state_per_byte)))
            for weight in known.weights
        ]
        return Bill(_saved(room, 1), _work(room), shared)


def _saved(room: Room, kept: int) -> list[list[int]]:
    saved = room.known.saved_bytes
    return [[kept * int(nbytes) for nbytes in saved[d.name]] for d in room.cluster.devices]


def _work(room: Room) -> list[list[int]]:
    work = room.known.workspace_bytes
    return [[int(nbytes) for nbytes in work[d.name]] for d in room.cluster.devices]


class Ledger:
    """What every device holds if ops are scattered, kept up to date move by move: mutable."""

    def __init__(self, room: Room, homes: Sequence[int]) -> None:
        self.room, self.homes = room, list(homes)
        devices = room.cluster.devices
        self._names = [device.name for device in devices]
        self._limits = [device.memory_bytes for device in devices]
        self._bill = bill = Bill.scattered(room)
        self._touches: list[list[int]] = [[] for _ in room.known.groups]
        for number, (units, _) in enumerate(bill.shared):
            for unit in set(units):
                self._touches[unit].append(number)
        self._here = [[0] * len(bill.shared) for _ in devices]
        self.held = [0] * len(devices)
        for unit, home in enumerate(self.homes):
            self._enter(unit, home)
        self._unsure = set(range(len(devices)))  # what may have changed since the last answer

    def move(self, unit: int, to: int) -> None:
        """Put a unit on another device."""
        at = self.homes[unit]
        if at == to:
            return
        self._leave(unit, at)
        self._enter(unit, to)
        self.homes[unit] = to
        self._unsure |= {at, to}

    def fits(self) -> bool:
        """Whether every device can hold what it has, as a pipeline if it is one."""
        self._unsure = {device for device in self._unsure if not self._fits(device)}
        if not self._unsure:
            return True
        if not is_pipeline(self.room.known, self.homes):
            return False
        return self.room.fits([self._names[home] for home in self.homes])

    def total(self, device: int) -> int:
        """Return what a device holds, its largest workspace included."""
        return self.held[device] + max(self._workspaces(device), default=0)

    def _fits(self, device: int) -> bool:
        return self.total(device) <= self._limits[device]

    def _workspaces(self, device: int) -> Iterable[int]:
        work = self._bill.work[device]
        return (work[unit] for unit, home in enumerate(self.homes) if home == device)

    def _enter(self, unit: int, device: int) -> None:
        here = self._here[device]
        self.held[device] += self._bill.own[device][unit]
        for number in self._touches[unit]:
            if not here[number]:
                self.held[device] += self._bill.shared[number][1]
            here[number] += 1

    def _leave(self, unit: int, device: int) -> None:
        here = self._here[device]
        self.held[device] -= self._bill.own[device][unit]
        for number in self._touches[unit]:
            here[number] -= 1
            if not here[number]:
                self.held[device] -= self._bill.shared[number][1]
