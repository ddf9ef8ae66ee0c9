"""Units in one order -> what the pieces between two places take, send and hold.

Where a model repeats its blocks, cuts are only looked for where little crosses, so that the time
grows with the number of these places and not with the model. It knows no schedule and no
sequence of devices; `cutter` chooses the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.search.work import Array, Numbers, OnKind, Work
from bigbrain_fx.tensors import AHEAD


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
    """What crosses each place of a line, per micro-batch: bytes and numbers of tensors."""

    forward_bytes: Array
    backward_bytes: Array
    forward_count: Array
    backward_count: Array
    tied_bytes: Array


@dataclass(frozen=True)
class Reach:
    """Which pieces fit, [first place, place after the last].

    From first place i, all ends up to `all_until[i]` fit. Beyond, some may: a longer piece may send
    less. `fits` has them; None when there are none.
    """

    all_until: Numbers
    fits: NDArray[np.bool_] | None

    @staticmethod
    def of(fits: NDArray[np.bool_]) -> Reach:
        """Sum a matrix up."""
        count = len(fits) - 1
        later = np.triu(np.ones_like(fits), 1)
        blocked = later & ~fits
        until = np.where(blocked.any(axis=1), blocked.argmax(axis=1) - 1, count)
        beyond = later & fits & (np.arange(count + 1)[None, :] > until[:, None])
        return Reach(until, fits & later if beyond.any() else None)

    def has(self, first: int, after: int) -> bool:
        """Whether a piece fits."""
        fits = self.fits is not None and bool(self.fits[first, after])
        return first < after and (fits or after <= int(self.all_until[first]))

    def last(self, first: int, most: int) -> int:
        """Return the largest end up to `most` with which a piece fits; `first` if there is none."""
        if self.fits is None:
            return max(first, min(most, int(self.all_until[first])))
        ends = np.flatnonzero(self.fits[first, : most + 1])
        return int(ends[-1]) if len(ends) else first


@dataclass(frozen=True)
class Setting:
    """For what a line is cut: a cluster with the memory that is left for tensors, and so on."""

    cluster: Cluster
    micro_batches: int
    recompute: bool = False


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
        self._memory: dict[tuple[int, int, bool, int], Reach] = {}

    def until(self, device: str) -> tuple[Array, Array, Array]:
        """Return forward, backward and once-a-step seconds of all units before each place."""
        on = self.work.on[device]
        if id(on) not in self._until:
            each = (on.forward_s, on.backward_s, on.once_s)
            forward, backward, once = (self._sums(array) for array in each)
            self._until[id(on)] = forward, backward, once
        return self._until[id(on)]

    def unit_until(self, device: str, setting: Setting) -> Array:
        """Return the seconds per micro-batch of all units before each place, all included."""
        forward, backward, once = self.until(device)
        again = 2.0 if setting.recompute else 1.0
        found: Array = again * forward + backward + once / setting.micro_batches
        return found

    @cached_property
    def crossing(self) -> Crossing:
        """What crosses the places where the line may be cut."""
        return Crossing(*(array[self.places] for array in self._all))

    def homes(self, split: Split) -> list[str]:
        """Return the device of every unit, by its number."""
        found = [""] * self.work.count
        bounds = self.places[list(split.cuts)]
        for device, first, after in zip(split.sequence, bounds[:-1], bounds[1:], strict=True):
            for unit in self.order[first:after]:
                found[unit] = device
        return found

    # ------------------------------------------------------------------ places

    def _sums(self, each: Array) -> Array:
        found: Array = np.concatenate(([0.0], np.cumsum(each[list(self.order)])))[self.places]
        return found

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

    # ------------------------------------------------------------------ memory

    def bytes_needed(self, device: str, in_flight: int, recompute: bool) -> Array:
        """Return [first place, place after the last] -> what the piece holds at its worst.

        An upper bound of what the simulator books, as far as the estimator's figures go.
        """
        on, flight = self.work.on[device], in_flight if self.work.trains else 1
        saved = self._sums(on.saved_bytes)
        kept = saved[None, :] - saved[:, None]
        found = self._once_bytes + flight * self._flight_bytes
        found += kept if recompute else flight * kept
        return found + self._largest(on.workspace_bytes)

    def most_in_flight(self, device: str, first: int, after: int, memory: int, again: bool) -> int:
        """Return how many micro-batches of a piece fit, at least 1."""
        on = self.work.on[device]
        saved = self._sums(on.saved_bytes)
        kept = float(saved[after] - saved[first])
        units = list(self.order[self.places[first] : self.places[after]])
        once = self._once_bytes[first, after] + on.workspace_bytes[units].max(initial=0.0)
        each = self._flight_bytes[first, after] + (0.0 if again else kept)
        left = memory - once - (kept if again else 0.0)
        return max(1, int(left / each)) if each > 0 else 1 << 30

    def reach(self, device: str, in_flight: int, setting: Setting) -> Reach:
        """Return which pieces a device can hold."""
        memory = setting.cluster.device[device].memory_bytes
        key = (id(self.work.on[device]), in_flight, setting.recompute, memory)
        if key not in self._memory:
            needed = self.bytes_needed(device, in_flight, setting.recompute)
            self._memory[key] = Reach.of(needed <= memory)
        return self._memory[key]

    @cached_property
    def _once_bytes(self) -> Array:
        sums = _Rectangles(self)
        for weight in self.work.weights:
            times = self.work.gradients + self.work.state_per_byte
            nbytes = weight.nbytes + weight.trained_bytes * times
            ties = max(0, min(len(weight.readers), len(self.work.on)) - 1)
            sums.reads(weight.readers, None, nbytes + ties * weight.trained_bytes)
        for value in self.work.values:
            ahead = AHEAD * (value.nbytes + value.gradient_bytes)
            sums.reads(value.readers, value.maker, 2 * value.gradient_bytes + ahead)
            sums.makes(value.maker, value.readers, (1 + AHEAD) * value.gradient_bytes)
        return sums.total()

    @cached_property
    def _flight_bytes(self) -> Array:
        sums = _Rectangles(self)
        for value in self.work.values:
            sums.reads(value.readers, value.maker, value.nbytes)
            sums.makes(value.maker, value.readers, value.nbytes)
        return sums.total()

    def _largest(self, each: Array) -> Array:
        """Return the largest entry of each piece."""
        line = each[list(self.order)]
        block = np.maximum.reduceat(line, self.places[:-1]) if len(line) else line
        count = len(block)
        found = np.zeros((count + 1, count + 1))
        found[:-1, 1:] = np.where(np.tri(count, dtype=bool).T, block[None, :], 0)
        return np.maximum.accumulate(found, axis=1)


class _Rectangles:
    """Sums of constants over rectangles of [first place, place after]: corners, then two sums."""

    def __init__(self, line: Line) -> None:
        self._at = line._at
        self._block = np.searchsorted(line.places, np.arange(line.work.count), side="right") - 1
        self._size = line.count + 2
        self._corners: list[tuple[int, int, int, int, float]] = []

    def reads(self, readers: Sequence[int], maker: int | None, nbytes: float) -> None:
        """Add to pieces that begin after the maker and contain a reader."""
        before = -1 if maker is None else int(self._block[self._at[maker]])
        for block in sorted({int(self._block[self._at[reader]]) for reader in readers}):
            if block > before:
                self._corners.append((before + 1, block + 1, block + 1, self._size, nbytes))
                before = block

    def makes(self, maker: int, readers: Sequence[int], nbytes: float) -> None:
        """Add to pieces that contain the maker and end before its last reader."""
        block = int(self._block[self._at[maker]])
        last = max(int(self._block[self._at[reader]]) for reader in readers)
        if last > block:
            self._corners.append((0, block + 1, block + 1, last + 1, nbytes))

    def total(self) -> Array:
        found = np.zeros((self._size + 1, self._size + 1))
        if self._corners:
            top, bottom, left, right, nbytes = np.array(self._corners).T
            rows = [c.astype(np.intp) for c in (top, bottom)]
            columns = [c.astype(np.intp) for c in (left, right)]
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    np.add.at(found, (row, column), nbytes if i == j else -nbytes)
        size = self._size - 1
        summed: Array = found.cumsum(axis=0).cumsum(axis=1)[:size, :size]
        return summed
