"""Units in one order -> inputs, outputs and memory of the pieces between two places.

Where a model repeats its blocks, cuts are only looked for where little crosses. The time then grows
with the number of these places and not with the model. The module does not know schedules or
sequences of devices; `cutter` chooses the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bigbrain_fx.planning.device_orders import Rough
from bigbrain_fx.planning.piece_memory import PieceMemory, Setting, before_places
from bigbrain_fx.planning.unit_work import Array, Numbers, OnKind, Work
from bigbrain_fx.planning.units import Value

_QUIET = 0.25
"""Of the places where a line may be cut, in the order of what crosses: which one is typical."""


@dataclass(frozen=True, slots=True)
class Split:
    """Stage s has the units between places cuts[s] and cuts[s + 1] of a line, on sequence[s]."""

    sequence: tuple[str, ...]
    cuts: tuple[int, ...]
    sum_s: float
    most_s: float

    def step_s(self, micro_batches: int) -> float:
        """Return the objective."""
        return self.sum_s + (micro_batches - 1) * self.most_s


@dataclass(frozen=True)
class Crossing:
    """Traffic across each place of a chain, per micro-batch: bytes and numbers of tensors."""

    forward_bytes: Array
    backward_bytes: Array
    forward_count: Array
    backward_count: Array
    tied_bytes: Array


class Line:
    """The units in one order, and the places where they may be cut.

    Args:
        work: in the order of `work.groups`.
        order: of its units.
        most_cuts: places to look at; fewer than the units when there are too many.
    """

    def __init__(self, work: Work, order: Sequence[int], most_cuts: int) -> None:
        self.work, self.order = work, tuple(order)
        self._at = {unit: place for place, unit in enumerate(order)}
        self._all = self._crossing()
        self.places = self._places(most_cuts)
        self.count = len(self.places) - 1
        self._until: dict[int, tuple[Array, Array, Array]] = {}
        self.memory = PieceMemory(work, self.order, self.places)

    def until(self, device: str) -> tuple[Array, Array, Array]:
        """Return forward, backward and once-a-step seconds of all units before each place."""
        on = self.work.on[device]
        if id(on) not in self._until:
            each = (on.forward_s, on.backward_s, on.once_s)
            forward, backward, once = (
                before_places(array, self.order, self.places) for array in each
            )
            self._until[id(on)] = forward, backward, once
        return self._until[id(on)]

    def bytes_needed(self, device: str, in_flight: int, setting: Setting) -> Array:
        """Return [first place, place after the last] -> what the piece holds at its worst."""
        return self.memory.bytes_needed(device, in_flight, setting)

    def unit_until(self, device: str, setting: Setting) -> Array:
        """Return the seconds per micro-batch of all units before each place, all included."""
        forward, backward, once = self.until(device)
        again = 2.0 if setting.recompute or self.work.recompute else 1.0
        found: Array = again * forward + backward + once / setting.micro_batches
        return found

    def rough(self, micro_batches: int) -> Rough:
        """Return about what any pipeline takes: of cuts, one where little crosses."""
        whole = {
            device: float(forward[-1] + backward[-1] + once[-1] / micro_batches)
            for device, (forward, backward, once) in ((d, self.until(d)) for d in self.work.on)
        }
        inner = slice(1, -1) if self.count > 1 else slice(None)
        crossing = (self.crossing.forward_bytes[inner], self.crossing.backward_bytes[inner])
        there, back = (float(np.quantile(each, _QUIET)) for each in crossing)
        times = 1 + self.work.state_per_byte
        held = sum(w.nbytes + times * w.trained_bytes for w in self.work.weights)
        return Rough(whole, there, back, micro_batches, held, self.work.ranks)

    @cached_property
    def crossing(self) -> Crossing:
        """Return the traffic across the places where the chain may be cut."""
        return Crossing(*(array[self.places] for array in self._all))

    def homes(self, split: Split) -> list[str]:
        """Return the device of every unit, by its number."""
        found = [""] * self.work.count
        bounds = self.places[list(split.cuts)]
        for device, first, after in zip(split.sequence, bounds[:-1], bounds[1:], strict=True):
            for unit in self.order[first:after]:
                found[unit] = device
        return found

    def stage_of(self, split: Split) -> list[int]:
        """Return the stage of every unit, by its number."""
        lengths = np.diff(self.places[list(split.cuts)])
        found = np.empty(self.work.count, dtype=np.intp)
        found[self._units] = np.repeat(np.arange(len(lengths)), lengths)
        stages: list[int] = found.tolist()
        return stages

    def between(self, stage_of: Sequence[int]) -> list[Value]:
        """Return the values that leave a stage, in the order of their makers' stages."""
        makers, lasts = self._ends
        stages = np.asarray(stage_of)
        numbers = np.flatnonzero(stages[makers] != stages[lasts])
        ranked = numbers[np.argsort(stages[makers[numbers]], kind="stable")]
        return [self.work.values[number] for number in ranked.tolist()]

    @cached_property
    def _units(self) -> Numbers:
        return np.array(self.order, dtype=np.intp)

    @cached_property
    def _ends(self) -> tuple[Numbers, Numbers]:
        """The unit that makes each value, and the last that reads it."""
        makers = [value.maker for value in self.work.values]
        lasts = [max(value.readers, key=self._at.__getitem__) for value in self.work.values]
        return np.array(makers, dtype=np.intp), np.array(lasts, dtype=np.intp)

    # ------------------------------------------------------------------ places

    def _crossing(self) -> tuple[Array, ...]:
        """Return what crosses each unit's place: a value from its maker to its last reader."""
        found = np.zeros((5, self.work.count + 1))
        for value in self.work.values:
            first = self._at[value.maker]
            last = max(self._at[reader] for reader in value.readers)
            graded = value.gradient_bytes > 0
            column = np.array([value.nbytes, value.gradient_bytes, 1, graded, 0], dtype=np.float64)
            found[:, first + 1] += column
            found[:, last + 1] -= column
        for weight in self.work.weights:
            if len(weight.readers) > 1:
                ends = sorted(self._at[reader] for reader in weight.readers)
                found[4, ends[0] + 1] += weight.trained_bytes
                found[4, ends[-1] + 1] -= weight.trained_bytes
        return tuple(found.cumsum(axis=1))

    def _places(self, most: int) -> Numbers:
        """Return the places that may be cut: of equal shares of the work, where least crosses."""
        count = self.work.count
        if count <= most:
            return np.arange(count + 1)
        seconds = sum((on.forward_s + on.backward_s) for on in self._kinds())
        line_s = np.asarray(seconds)[list(self.order)]
        held = np.zeros(count)
        for weight in self.work.weights:
            held[self._at[weight.readers[0]]] += weight.nbytes
        weights = [each / max(float(each.sum()), 1e-300) for each in (line_s, held)]
        share = np.cumsum(weights[0] + weights[1] + 1.0 / count)
        share *= most / float(share[-1]) * (1 - 1e-9)
        bucket = np.concatenate(([-1], share.astype(np.intp)))  # of the place after each unit
        bytes_ = self._all[0] + self._all[1] + self._all[4]
        ranked = np.lexsort((np.arange(count + 1), bytes_, bucket))
        firsts = np.concatenate(([True], np.diff(bucket[ranked]) > 0))
        chosen = set(ranked[firsts].tolist()) | {0, count}
        return np.array(sorted(chosen), dtype=np.intp)

    def _kinds(self) -> list[OnKind]:
        return list({id(on): on for on in self.work.on.values()}.values())
