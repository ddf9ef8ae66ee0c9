"""Units on concrete devices and links -> placements of least step, or least busiest, by CP-SAT.

Two objectives over any placement, contiguous or not: one micro-batch walked through alone, one unit
after another, + (M - 1) x the busiest device or link; and that busiest alone, whose proven bound is
one of every step whatever its schedule. It knows no stages.

Source: as `least_load`; links between pairs of devices instead of one host, as in `clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioners.clock import TICKS_PER_S, Clock, Timing
from partitioners.room import Bill, Room
from partitioners.sat import FINENESS, Variable, cp_model, solved

MOST_RIDES = 60_000  # values x pairs of devices; beyond, programs take gigabytes


@dataclass(frozen=True)
class LeastStep:
    """Homes, if any that fit were found, and a bound in seconds of the objective."""

    homes: tuple[int, ...] | None
    bound_s: float
    impossible: bool = False


def rides(timing: Timing) -> int:
    """Return how many messages a program would have to tell apart."""
    devices = len(timing.cluster.devices)
    return len(timing.known.values) * devices * (devices - 1)


def least_step(
    timing: Timing, room: Room, start: Sequence[int], work: float, seed: int
) -> LeastStep:
    """Return a placement whose serial step is least, as far as the work allows."""
    program = _Program(timing, start, Bill.scattered(room))
    more = timing.micro_batches - 1
    program.model.minimize(sum(program.serial) + more * program.busiest)
    return program.found(start, work, seed)


def least_busiest(
    timing: Timing, room: Room, start: Sequence[int], work: float, seed: int
) -> LeastStep:
    """Return a placement whose busiest device or link is least, and a bound of that.

    Memory counts only what no placement holds less than, so that the bound is one of all.
    """
    program = _Program(timing, start, Bill.at_least(room))
    program.model.minimize(program.busiest)
    return program.found(start, work, seed)


class _Program:
    """The integer program; ticks are divided and rounded down, so that bounds stay bounds."""

    def __init__(self, timing: Timing, start: Sequence[int], bill: Bill) -> None:
        self.timing, self.bill = timing, bill
        self.model = cp_model().CpModel()
        self._devices = range(len(timing.cluster.devices))
        most = Clock(timing, start).most()
        self.ticks = max(1, most // FINENESS)  # in one whole number of the program
        self.serial: list[Variable] = []
        self._links: dict[tuple[int, int], list[Variable]] = {}
        self._loads: list[list[Variable]] = [[] for _ in self._devices]
        self.runs = [self._unit(unit) for unit in range(len(timing.known.groups))]
        for value in range(len(timing.known.values)):
            self._send(value)
        everything = sum(max(row) for row in zip(*timing.unit_ticks, strict=True))
        self.busiest = self.model.new_int_var(0, max(1, everything // self.ticks), "busiest")
        for terms in (*self._loads, *self._links.values()):
            self.model.add(sum(terms) <= self.busiest)
        for device in self._devices:
            self._limit_memory(device)

    def found(self, start: Sequence[int], work: float, seed: int) -> LeastStep:
        """Solve, from a placement on."""
        wanted = [here for each in self.runs for here in each]
        homes = list(start)
        hints = {
            here: int(homes[unit] == device)
            for unit, each in enumerate(self.runs)
            for device, here in enumerate(each)
        }
        answer = solved(self.model, wanted, hints, work, seed)
        bound_s = answer.bound * self.ticks / TICKS_PER_S
        if answer.values is None:
            return LeastStep(None, bound_s, answer.impossible)
        count = len(self._devices)
        rows = (answer.values[i : i + count] for i in range(0, len(wanted), count))
        return LeastStep(tuple(row.index(1) for row in rows), bound_s)

    def _unit(self, unit: int) -> list[Variable]:
        each = [self.model.new_bool_var(f"{unit} on {device}") for device in self._devices]
        self.model.add_exactly_one(each)
        for device, here in enumerate(each):
            term = self.timing.unit_ticks[device][unit] // self.ticks * here
            self._loads[device].append(term)
            self.serial.append(term)
        return each

    def _send(self, number: int) -> None:
        """Say which way a value goes: from its maker's device to each other one that reads it."""
        value = self.timing.known.values[number]
        for a in self._devices:
            for b in self._devices:
                if a == b:
                    continue
                ride = self.timing.ride(number, a, b)
                goes = self.model.new_bool_var("")
                leaves = ~self.runs[value.maker][a]
                for reader in value.readers:
                    self.model.add_bool_or([leaves, ~self.runs[reader][b], goes])
                self.serial.append(ride.late // self.ticks * goes)
                self._links.setdefault((a, b), []).append(ride.there // self.ticks * goes)
                self._links.setdefault((b, a), []).append(ride.back // self.ticks * goes)
                for end in (a, b):
                    self._loads[end].append(ride.handling // self.ticks * goes)

    def _limit_memory(self, device: int) -> None:
        limit = self.timing.cluster.devices[device].memory_bytes
        own, work = self.bill.own[device], self.bill.work[device]
        if sum(own) + max(work, default=0) + sum(n for _, n in self.bill.shared) <= limit:
            return
        terms = [nbytes * each[device] for nbytes, each in zip(own, self.runs, strict=True)]
        largest = self.model.new_int_var(0, max(work, default=0), "")
        for nbytes, each in zip(work, self.runs, strict=True):
            self.model.add(largest >= nbytes * each[device])
        for units, nbytes in self.bill.shared:
            held = self.model.new_bool_var("")
            for unit in set(units):
                self.model.add_implication(self.runs[unit][device], held)
            terms.append(nbytes * held)
        self.model.add(sum(terms) + largest <= limit)
