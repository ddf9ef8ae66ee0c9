"""Units in one order -> the best cuts into one piece per device, by dynamic programming.

For a sequence of devices and a limit on how long each device and link may be busy, it minimises

    sum of all stages' times and round trips + (micro_batches - 1) x the busiest device or link

Where a model repeats its blocks, cuts are only looked for where little crosses, so that the time
grows with the number of these places and not with the model. It knows no schedule: what is in
flight is given.

Source: planners.md 4; Alpa (Zheng et al., OSDI'22, section 5.2), with links as resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.search.work import Array, Numbers, OnKind, Work

AHEAD = 2
"""Receives that the runtime posts ahead on every channel."""
_ROUNDING = 1.0 + 1e-12
_HALVINGS = 18


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


@dataclass(frozen=True, slots=True)
class _Hop:
    """Each place as a cut between two devices: there and back, and the busier direction."""

    round_trip_s: Array
    wire_s: Array


class Cutter:
    """Solves one line for one setting; remembers what sequences share.

    Attributes:
        steps: stages solved so far: the work that `Limits.steps` counts.
    """

    def __init__(self, line: Line, setting: Setting) -> None:
        self.line, self.setting, self.steps = line, setting, 0
        self._unit_until = {d: line.unit_until(d, setting) for d in line.work.on}
        self._hops: dict[tuple[object, ...], _Hop] = {}

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`: the work divided by speed, and the dearest unit."""
        return least_busy_s(np.stack([np.diff(self._unit_until[d]) for d in sequence]))

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None when there is none."""
        if len(sequence) > self.line.count:
            return None
        self.steps += len(sequence)
        tail: Array | None = None
        ends: list[Numbers] = []
        for stage in range(len(sequence) - 1, -1, -1):
            tail, end = self._stage(sequence, stage, limit_s, tail)
            ends.append(end)
        assert tail is not None
        if not np.isfinite(tail[0]):
            return None
        cuts = [0]
        for end in reversed(ends):
            cuts.append(int(end[cuts[-1]]))
        return self.measure(sequence, cuts)

    def tapered(self, sequence: Sequence[str]) -> Split | None:
        """Return a split whose stages end together: later ones begin later, so they get less.

        The least T, by bisection, such that stages taken greedily keep head_s + M t_s <= T, where
        the head is the sum of what comes before: what `bound` bounds, as a split.
        """
        if len(sequence) > self.line.count:
            return None
        low_s = self.setting.micro_batches * self.least_busy_s(sequence)
        high_s = 4 * low_s + sum(float(until[-1]) for until in self._unit_until.values())
        best: list[int] | None = None
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            cuts = self._within(sequence, middle_s)
            best, low_s, high_s = (cuts, low_s, middle_s) if cuts else (best, middle_s, high_s)
        return self.measure(sequence, best) if best else None

    def _within(self, sequence: Sequence[str], most_s: float) -> list[int] | None:
        """Return cuts with head_s + M t_s <= `most_s` for every stage, if the greedy finds some."""
        cuts, head_s, count = [0], 0.0, self.line.count
        micro, stages = self.setting.micro_batches, len(sequence)
        for stage, device in enumerate(sequence):
            self.steps += 1
            until, first = self._unit_until[device], cuts[-1]
            room_s = (most_s - head_s) / micro
            after = int(np.searchsorted(until, (until[first] + room_s) * _ROUNDING, "right")) - 1
            flight = max(1, min(micro, stages - stage))
            reach = self.line.reach(device, flight, self.setting)
            after = reach.last(first, min(after, count - (stages - 1 - stage)))
            if after <= first:
                return None
            cuts.append(after)
            if stage + 1 < stages:
                trip_s = self._hop(device, sequence[stage + 1]).round_trip_s[after]
                head_s += float(until[after] - until[first] + trip_s)
        return cuts if cuts[-1] == count else None

    def measure(self, sequence: Sequence[str], cuts: Sequence[int]) -> Split:
        """Return the split with these cuts and its times; memory is not looked at."""
        untils = [self._unit_until[device] for device in sequence]
        loads = [float(u[b] - u[a]) for u, a, b in zip(untils, cuts[:-1], cuts[1:], strict=True)]
        hops = [self._hop(a, b) for a, b in pairwise(sequence)]
        trips = [float(hop.round_trip_s[cut]) for hop, cut in zip(hops, cuts[1:-1], strict=True)]
        wires = [float(hop.wire_s[cut]) for hop, cut in zip(hops, cuts[1:-1], strict=True)]
        return Split(
            tuple(sequence), tuple(cuts), sum(loads) + sum(trips), max([*loads, *wires], default=0)
        )

    def _stage(
        self, sequence: Sequence[str], stage: int, limit_s: float, tail: Array | None
    ) -> tuple[Array, Numbers]:
        """Return, for each first place, the least sum of this stage and all later ones; its end."""
        line, until = self.line, self._unit_until[sequence[stage]]
        flight = max(1, min(self.setting.micro_batches, len(sequence) - stage))
        latest = np.searchsorted(until, until + limit_s * _ROUNDING, side="right") - 1
        reach = line.reach(sequence[stage], flight, self.setting)
        if tail is None:
            rest = until[-1] - until
            fits = reach.all_until if reach.fits is None else line.count * reach.fits[:, -1]
            rest[np.minimum(latest, fits) < line.count] = np.inf
            rest[-1] = np.inf  # an empty stage is no stage
            return rest, np.full(line.count + 1, line.count)
        hop = self._hop(sequence[stage], sequence[stage + 1])
        at_end = until + hop.round_trip_s + tail
        at_end[hop.wire_s > limit_s * _ROUNDING] = np.inf
        if reach.fits is None:
            lasts = np.minimum(latest, reach.all_until)
            ends = first_minima(at_end, np.arange(1, line.count + 2), lasts)
        else:
            ends = _masked_minima(at_end, reach.fits, latest)
        least = np.where(ends >= 0, at_end[ends], np.inf) - until
        return least, ends

    def _hop(self, a: str, b: str) -> _Hop:
        cluster, crossing = self.setting.cluster, self.line.crossing
        link = cluster.link(a, b)
        rates = [rate for _, rate in cluster.nics(a, b)]
        ends = [cluster.device[name].overheads for name in (a, b)]
        key = (link, *rates, *ends)
        if key not in self._hops:
            per_s = min([link.bytes_per_s, *rates])
            there, back = crossing.forward_bytes / per_s, crossing.backward_bytes / per_s
            tied = crossing.tied_bytes / per_s / self.setting.micro_batches
            trips = 1.0 * (crossing.forward_bytes > 0) + (crossing.backward_bytes > 0)
            handled = np.zeros_like(there)
            for end in ends:
                handled += end.message_s * (crossing.forward_count + crossing.backward_count)
                if end.message_bytes_per_s:
                    total = crossing.forward_bytes + crossing.backward_bytes
                    handled += total / end.message_bytes_per_s
            round_trip = there + back + 2 * tied + trips * link.latency_s + handled
            self._hops[key] = _Hop(round_trip, np.maximum(there, back) + tied)
        return self._hops[key]


def least_busy_s(seconds: Array) -> float:
    """Return a lower bound of the largest load, however units are spread: [device, unit].

    By weak duality: weights y_d that add up to 1 make the mean load, and so the largest, at least
    the sum over units of min_d y_d t_ud; y_d goes by speed.
    """
    if seconds.shape[1] == 0:
        return 0.0
    speed = 1.0 / np.maximum(seconds.sum(axis=1), 1e-300)
    shares = speed / speed.sum()
    return float(max((seconds * shares[:, None]).min(axis=0).sum(), seconds.min(axis=0).max()))


def _masked_minima(values: Array, allowed: NDArray[np.bool_], lasts: Numbers) -> NDArray[np.intp]:
    """Return where the least of the allowed values up to each last one is; -1 if none is finite."""
    within = np.arange(len(values))[None, :] <= lasts[:, None]
    each = np.where(allowed & within, values[None, :], np.inf)
    found = each.argmin(axis=1)
    return np.where(np.isfinite(each[np.arange(len(values)), found]), found, -1)


def first_minima(values: Array, firsts: Numbers, lasts: Numbers) -> NDArray[np.intp]:
    """Return where the least of values[first : last + 1] is, for every range; -1 if none is finite.

    Of equal ones the earliest. A sparse table of positions: n log n.
    """
    count = len(values)
    lengths = np.minimum(lasts, count - 1) - firsts + 1
    level_of = np.frexp(np.maximum(lengths, 1))[1] - 1
    table = [np.arange(count)]
    for level in range(int(level_of.max())):
        half = 1 << level
        left, right = table[-1][:-half], table[-1][half:]
        row = table[-1].copy()
        row[:-half] = np.where(values[right] < values[left], right, left)
        table.append(row)
    stacked = np.stack(table)
    start = np.minimum(firsts, count - 1)
    second = np.maximum(np.minimum(lasts, count - 1) - (1 << level_of) + 1, 0)
    left, right = stacked[level_of, start], stacked[level_of, second]
    found = np.where(values[right] < values[left], right, left)
    return np.where((lengths > 0) & np.isfinite(values[found]), found, -1)
