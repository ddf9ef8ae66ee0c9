"""An upper bound of the memory that units take on devices under any placement.

The bound is never below what the plan's ledger books. Where devices do not depend on each other in
a circle, a placement has one stage per device. Each stage is then a piece of a chain, whose memory
`planning.piece_memory` has. Any other placement has several stages on a device; each unit may be a
stage of its own there, with any micro-batch in flight:

    weights + optimizer state + a gradient for each reader, and their sum
    + in_flight x (saved activations + values made or read)
    + gradients of these values + receives posted ahead + the largest workspace
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.planning import (
    AHEAD,
    InFlight,
    PieceMemory,
    Setting,
    Work,
    in_flight_at,
    neighbours,
    stage_lists,
)

_Home = TypeVar("_Home", bound=Hashable)  # a device, by name or by number


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one device has to hold at its worst moment, and what they are of."""

    total: int
    weights: int
    gradients: int
    optimizer: int

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
        }
        parts["activations and messages"] = self.total - sum(parts.values())
        return ", ".join(f"{name} {readable(n)}" for name, n in parts.items() if n > 0)


def readable(nbytes: float) -> str:
    """Write bytes for people: "17.2 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"


@dataclass(frozen=True)
class MemoryBound:
    """The memory of devices for one step of a graph.

    Attributes:
        known: the units.
        cluster: the devices; what they have is the limit.
        micro_batches: per step.
        in_flight: as in `planning.in_flight_at`; a device with several stages counts the largest.
    """

    known: Work
    cluster: Cluster
    micro_batches: int
    in_flight: InFlight = None

    def fits(self, homes: Sequence[str]) -> bool:
        """Whether every device can hold its units."""
        return all(
            nbytes <= self.cluster.device[device].memory_bytes
            for device, nbytes in self.total_bytes(homes).items()
        )

    def total_bytes(self, homes: Sequence[str]) -> Mapping[str, int]:
        """Return what each device in use holds at its worst moment."""
        before = upstream(self.known, homes)
        if is_acyclic(before):
            return self._of_pieces(homes, before)
        ledger = Ledger(self, [self._number[home] for home in homes])
        return {device: ledger.total(self._number[device]) for device in before}

    def needs(self, homes: Sequence[str]) -> Mapping[str, Need]:
        """Return the same with what it is of."""
        return {d: self._need(d, homes, total) for d, total in self.total_bytes(homes).items()}

    def require_fits(self, homes: Sequence[str], name: str) -> None:
        """Raise when a device may not hold its part.

        Raises:
            NoPlanError: with what every device needs at most, and has, and the placement.
        """
        if self.fits(homes):
            return
        error = NoPlanError(
            f"the {name} split does not fit into the devices' memory",
            code="BX1403",
            notes=self.notes(homes),
            help="use --partitioner analytical, which splits by memory too, or more micro-batches",
        )
        error.nearest = self.known.placed(homes, homes[0])
        raise error

    def notes(self, homes: Sequence[str]) -> tuple[str, ...]:
        """Return the arithmetic of each device as a line: what it needs, of what, and has."""
        return tuple(self._note(device, need) for device, need in self.needs(homes).items())

    @property
    def flight_of_many_stages(self) -> int:
        """How many micro-batches a device with several stages may hold at once."""
        if self.in_flight is None or not self.known.trains:
            return self.micro_batches if self.known.trains else 1
        most = self.in_flight if isinstance(self.in_flight, int) else max(self.in_flight)
        return max(1, min(self.micro_batches, most))

    def _of_pieces(self, homes: Sequence[str], before: Mapping[str, set[str]]) -> dict[str, int]:
        flights = in_flight_by_device(before, self.micro_batches, self.in_flight)
        stages = self._stages(homes)
        order = [unit for units in stages for unit in units]
        places = np.cumsum([0, *map(len, stages)])
        memory = PieceMemory(self.known, order, places)
        found = {}
        for stage, units in enumerate(stages):
            device = homes[units[0]]
            held = memory.bytes_needed(device, flights[device], self._setting)
            found[device] = math.ceil(held[stage, stage + 1])
        return found

    def _stages(self, homes: Sequence[str]) -> list[list[int]]:
        """Return the units of each stage, in the order of `plan.cut`.

        The gradient of a later reader goes back through an earlier one. The order decides between
        two that do not wait for each other.
        """
        count, edges = self.known.count, self.known.edges
        waits_for = neighbours(count, ((b, a) for a, b in edges))
        return stage_lists(waits_for, neighbours(count, edges), [self._number[d] for d in homes])

    def _need(self, device: str, homes: Sequence[str], total: int) -> Need:
        here = {unit for unit, home in enumerate(homes) if home == device}
        weights = [w for w in self.known.weights if not here.isdisjoint(w.readers)]
        trained = sum(w.trained_bytes for w in weights)
        state = int(trained * self.known.state_per_byte)
        return Need(total, sum(w.nbytes for w in weights), trained, state)

    def _note(self, device: str, need: Need) -> str:
        available = self.cluster.device[device].memory_bytes
        verb = "and" if need.total <= available else "but"
        has = (
            readable(available) if available > 1 else "no free memory for tensors"
        )  # a process takes all
        return f"{device} needs {readable(need.total)} ({need}) {verb} has {has}"

    @cached_property
    def _setting(self) -> Setting:
        return Setting(self.cluster, self.micro_batches)

    @cached_property
    def _number(self) -> Mapping[str, int]:
        return {device.name: number for number, device in enumerate(self.cluster.devices)}


def upstream(known: Work, homes: Sequence[_Home]) -> dict[_Home, set[_Home]]:
    """Return for each device in use, in order of its first unit, those that it waits for."""
    before: dict[_Home, set[_Home]] = {device: set() for device in homes}
    edges = {(homes[a], homes[b]) for a, b in known.edges if homes[a] != homes[b]}
    reached = -1
    while (found := sum(map(len, before.values()))) > reached:
        reached = found
        for maker, reader in edges:
            before[reader] |= before[maker]
            before[reader].add(maker)
    return before


def is_acyclic(before: Mapping[_Home, set[_Home]]) -> bool:
    """Whether no device waits for itself through others."""
    return all(device not in devices for device, devices in before.items())


def in_flight_by_device(
    before: Mapping[str, set[str]], micro_batches: int, in_flight: InFlight
) -> dict[str, int]:
    """Return the most micro-batches that each device of a pipeline may hold.

    A stage can run as early as the stages that it depends on allow. Where two do not depend on
    each other (two towers, say), either may come first, and each is counted as if it did.
    """
    return {
        device: in_flight_at(len(devices), len(before), micro_batches, in_flight)
        for device, devices in before.items()
    }


def bytes_by_unit(known: Work, saved_bytes: NDArray[np.float64]) -> list[float]:
    """Return about what each unit adds to a device: weights, all that goes with them, and saved.

    A weight that several units read counts at the first.
    """
    found = saved_bytes.astype(np.float64)
    for weight in known.weights:
        trained = weight.trained_bytes * (2 + known.state_per_byte)
        found[weight.readers[0]] += weight.nbytes + trained
    return [float(nbytes) for nbytes in found]


def require_micro_batches(micro_batches: int) -> None:
    """Raise unless there is one at least."""
    if micro_batches < 1:
        raise InputError(f"a step needs at least 1 micro-batch, not {micro_batches}", code="BX1404")


class Ledger:
    """Memory of devices where each unit may be a stage of its own, unit by unit: mutable.

    Args:
        bound: of which memory and units.
        homes: the device of each unit, by number; -1: not placed yet.
    """

    def __init__(self, bound: MemoryBound, homes: Iterable[int] = ()) -> None:
        known, devices, flight = bound.known, bound.cluster.devices, bound.flight_of_many_stages
        self.homes = [-1] * known.count
        self._limits = [device.memory_bytes for device in devices]
        kept = known.kept(flight)
        self._own = [[kept * int(n) for n in known.saved_bytes[d.name]] for d in devices]
        self._work = [[int(n) for n in known.workspace_bytes[d.name]] for d in devices]
        self._shared: list[int] = []  # a weight, or a value made or read: once a device
        self._touches: list[list[int]] = [[] for _ in known.groups]
        for weight in known.weights:
            copies = 1 + len(weight.readers) + known.state_per_byte
            self._share(weight.readers, weight.nbytes + math.ceil(weight.trained_bytes * copies))
        for value in known.values:
            ahead = AHEAD * (value.nbytes + value.gradient_bytes)
            nbytes = flight * value.nbytes + 2 * value.gradient_bytes + ahead
            self._share((value.maker, *value.readers), nbytes)
        self._here = [[0] * len(self._shared) for _ in devices]
        self._held, self._most = [0] * len(devices), [0] * len(devices)
        for unit, home in enumerate(homes):
            self.move(unit, home)

    def move(self, unit: int, to: int) -> None:
        """Put a unit that is nowhere yet on a device."""
        self.homes[unit] = to
        here, held = self._here[to], self._held[to] + self._own[to][unit]
        for number in self._touches[unit]:
            held += 0 if here[number] else self._shared[number]
            here[number] += 1
        self._held[to] = held
        self._most[to] = max(self._most[to], self._work[to][unit])

    def total(self, device: int) -> int:
        """Return what a device holds, its largest workspace included."""
        return self._held[device] + self._most[device]

    def fits(self, device: int) -> bool:
        """Whether a device can hold what it has."""
        return self.total(device) <= self._limits[device]

    def has_room(self, unit: int, device: int) -> bool:
        """Whether a device can hold a unit besides what it has."""
        here, most = self._here[device], max(self._most[device], self._work[device][unit])
        new = sum(self._shared[number] for number in self._touches[unit] if not here[number])
        held = self._held[device] + self._own[device][unit] + new
        return held + most <= self._limits[device]

    def _share(self, units: Iterable[int], nbytes: int) -> None:
        for unit in set(units):
            self._touches[unit].append(len(self._shared))
        self._shared.append(nbytes)


# --------------------------------------------------------------------------- nothing fits


_PRECISION = 1.01

Fits = Callable[[float], Sequence[str] | None]
"""Factor of every device's memory -> a split that fits, as the device of every unit, if any."""


def no_plan(bound: MemoryBound, fits: Fits) -> NoPlanError:
    """Return the error for a model that does not fit; the nearest is sought when that is read."""
    return NoPlanError.later(lambda: _error(bound, fits))


def _error(bound: MemoryBound, fits: Fits) -> NoPlanError:
    scale, homes = _least_scale(fits)
    if homes is None:
        count, devices = bound.known.count, len(bound.cluster.devices)
        return NoPlanError(
            f"{devices} devices cannot share {count} groups of ops that stay together",
            code="BX1405",
            help=f"use at most {count} devices, or let the planner leave some out",
        )
    return NoPlanError(
        "no split fits into the devices' memory; this is the nearest",
        code="BX1406",
        notes=bound.notes(homes),
        help=f"give every device {scale:.1f} times the memory, or use more micro-batches, or more "
        "devices",
        nearest=bound.known.placed(homes, homes[0]),
    )


def _least_scale(fits: Fits) -> tuple[float, Sequence[str] | None]:
    """Return the least factor on all memories with which something fits, to a hundredth."""
    low, high = 1.0, 2.0
    split = fits(high)
    while split is None and high < 2.0**40:
        low, high = high, high * 2
        split = fits(high)
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        closer = fits(middle)
        low, high = (middle, high) if closer is None else (low, middle)
        split = closer or split
    return high, split
