"""A line's best cuts into one piece per device, by dynamic programming.

For a sequence of devices and a limit on how long each device and link may be busy, it minimises

    sum of all stages' times and round trips + (micro_batches - 1) x the busiest device or link

The algorithm does not know schedules: the number of micro-batches in flight is given.

Source: Alpa (Zheng et al., OSDI'22, section 5.2), with links as resources.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning.chain import Crossing, Line, Split
from bigbrain_fx.planning.device_kinds import bytes_per_s
from bigbrain_fx.planning.piece_memory import Setting
from bigbrain_fx.planning.unit_work import Array, Numbers

_ROUNDING = 1.0 + 1e-12
_HALVINGS = 18


@dataclass(frozen=True, slots=True)
class Hop:
    """Each place as a cut between two devices: there and back, and the busier direction."""

    round_trip_s: Array
    wire_s: Array


def hop_of(cluster: Cluster, a: str, b: str, crossing: Crossing, micro_batches: int) -> Hop:
    """Return what crossing from one device to another takes, per micro-batch."""
    latency_s, per_s = cluster.link(a, b).latency_s, bytes_per_s(cluster, a, b)
    there, back = crossing.forward_bytes / per_s, crossing.backward_bytes / per_s
    tied = crossing.tied_bytes / per_s / micro_batches
    trips = 1.0 * (crossing.forward_bytes > 0) + (crossing.backward_bytes > 0)
    handled = np.zeros_like(there)
    for end in (cluster.device[name].overheads for name in (a, b)):
        handled += end.message_s * (crossing.forward_count + crossing.backward_count)
        if end.message_bytes_per_s:
            total = crossing.forward_bytes + crossing.backward_bytes
            handled += total / end.message_bytes_per_s
    round_trip = there + back + 2 * tied + trips * latency_s + handled
    return Hop(round_trip, np.maximum(there, back) + tied)


class Cutter:
    """Solves one line for one setting; remembers what sequences share.

    Attributes:
        steps: stages solved so far: the work that `Limits.steps` counts.
    """

    def __init__(self, line: Line, setting: Setting) -> None:
        self.line, self.setting, self.steps = line, setting, 0
        kinds = {id(on): device for device, on in line.work.on.items()}  # of each, some device
        untils = {key: line.unit_until(device, setting) for key, device in kinds.items()}
        self._unit_until = {d: untils[id(on)] for d, on in line.work.on.items()}
        self._unit_s: dict[int, Array] = {key: np.diff(until) for key, until in untils.items()}
        self._least_trip_s: dict[int, float] = {}  # by hop
        self._hops: dict[tuple[object, ...], Hop] = {}
        self._hop_between: dict[tuple[str, str], Hop] = {}
        self._least_busy_s: dict[tuple[int, ...], float] = {}  # by kinds of devices
        self._tails: dict[tuple[object, ...], _Tail] = {}  # without a limit: sequences share ends

    def unit_s(self, device: str) -> Array:
        """Return the seconds per micro-batch of what lies between each two places."""
        return self._unit_s[id(self.line.work.on[device])]

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`: the work divided by speed, and the dearest unit."""
        key = tuple(sorted(id(self.line.work.on[d]) for d in sequence))
        if key not in self._least_busy_s:
            found = least_busy_s(np.stack([self.unit_s(d) for d in sequence]))
            self._least_busy_s[key] = found
        return self._least_busy_s[key]

    def least_sum_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `sum_s`: every unit and every hop where it takes least."""
        kinds = {id(self.line.work.on[device]) for device in sequence}
        units_s = float(np.stack([self._unit_s[key] for key in kinds]).min(axis=0).sum())
        return units_s + sum(self._least_trip(self.hop(a, b)) for a, b in pairwise(sequence))

    def _least_trip(self, hop: Hop) -> float:
        """Return what a hop takes where that is least; hops are kept, so each is asked once."""
        if id(hop) not in self._least_trip_s:
            self._least_trip_s[id(hop)] = float(hop.round_trip_s[1:-1].min(initial=np.inf))
        return self._least_trip_s[id(hop)]

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None when there is none."""
        if len(sequence) > self.line.count:
            return None
        self.steps += len(sequence)
        tails = self._solved(sequence, limit_s)
        if not np.isfinite(tails[0].sum_s[0]):
            return None
        cuts = [0]
        for tail in tails:
            cuts.append(tail.end(cuts[-1]))
        return self.measure(sequence, cuts)

    def _solved(self, sequence: Sequence[str], limit_s: float) -> list[_Tail]:
        """Return, for every stage, what it and all later ones take at least."""
        stages = len(sequence)
        flights = [self.setting.flight(stage, stages) for stage in range(stages)]
        known = self._tails if limit_s == np.inf else {}
        tails: list[_Tail] = []
        for stage in range(stages - 1, -1, -1):
            key = (tuple(sequence[stage:]), tuple(flights[stage:]))
            if key not in known:
                later = tails[-1] if tails else None
                known[key] = self._stage(sequence[stage:], flights[stage], limit_s, later)
            tails.append(known[key])
        return tails[::-1]

    def tapered(self, sequence: Sequence[str]) -> Split | None:
        """Return a split whose stages end together: later ones begin later, so they get less.

        Bisection finds the least T for which greedy stages keep head_s + M t_s <= T. The head is
        the time of all stages before; `bound` bounds the same T.
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

    def even(self, sequence: Sequence[str]) -> Split | None:
        """Return the split whose stages have about as many units each, if it fits."""
        count, stages = self.line.count, len(sequence)
        if stages > count:
            return None
        units = np.linspace(0, self.line.work.count, stages + 1)
        cuts = [int(np.argmin(abs(self.line.places - unit))) for unit in units]
        return self.measure(sequence, cuts) if self.fits(sequence, cuts) else None

    def fits(self, sequence: Sequence[str], cuts: Sequence[int]) -> bool:
        """Whether every stage has units, and its device can hold them."""
        stages = len(sequence)
        return all(
            self.line.memory.reach(device, self.setting.flight(stage, stages), self.setting).has(
                cuts[stage], cuts[stage + 1]
            )
            for stage, device in enumerate(sequence)
        )

    def _within(self, sequence: Sequence[str], most_s: float) -> list[int] | None:
        """Return cuts with head_s + M t_s <= `most_s` for every stage, if the greedy finds some."""
        cuts, head_s, count = [0], 0.0, self.line.count
        micro, stages = self.setting.micro_batches, len(sequence)
        for stage, device in enumerate(sequence):
            self.steps += 1
            until, first = self._unit_until[device], cuts[-1]
            room_s = (most_s - head_s) / micro
            after = int(np.searchsorted(until, (until[first] + room_s) * _ROUNDING, "right")) - 1
            flight = self.setting.flight(stage, stages)
            reach = self.line.memory.reach(device, flight, self.setting)
            after = reach.last(first, min(after, count - (stages - 1 - stage)))
            if after <= first:
                return None
            cuts.append(after)
            if stage + 1 < stages:
                trip_s = self.hop(device, sequence[stage + 1]).round_trip_s[after]
                head_s += float(until[after] - until[first] + trip_s)
        return cuts if cuts[-1] == count else None

    def measure(self, sequence: Sequence[str], cuts: Sequence[int]) -> Split:
        """Return the split with these cuts and its times; memory is not looked at."""
        untils = [self._unit_until[device] for device in sequence]
        loads = [float(u[b] - u[a]) for u, a, b in zip(untils, cuts[:-1], cuts[1:], strict=True)]
        hops = [self.hop(a, b) for a, b in pairwise(sequence)]
        trips = [float(hop.round_trip_s[cut]) for hop, cut in zip(hops, cuts[1:-1], strict=True)]
        wires = [float(hop.wire_s[cut]) for hop, cut in zip(hops, cuts[1:-1], strict=True)]
        return Split(
            tuple(sequence), tuple(cuts), sum(loads) + sum(trips), max([*loads, *wires], default=0)
        )

    def _stage(
        self, sequence: Sequence[str], flight: int, limit_s: float, later: _Tail | None
    ) -> _Tail:
        """Return what the first of these stages and all later ones take at least."""
        line, until = self.line, self._unit_until[sequence[0]]
        latest = np.searchsorted(until, until + limit_s * _ROUNDING, side="right") - 1
        reach = line.memory.reach(sequence[0], flight, self.setting)
        if later is None:
            at_end = np.full(line.count + 1, np.inf)
            at_end[-1] = until[-1]
        else:
            hop = self.hop(sequence[0], sequence[1])
            at_end = until + hop.round_trip_s + later.sum_s
            at_end[hop.wire_s > limit_s * _ROUNDING] = np.inf
        if reach.fits is None:
            lasts = np.minimum(latest, reach.all_until)
            least = range_minima(at_end, np.arange(1, line.count + 2), lasts)
            return _Tail(least - until, at_end, lasts, None)
        within = reach.fits & (np.arange(line.count + 1)[None, :] <= latest[:, None])
        least = np.where(within, at_end[None, :], np.inf).min(axis=1)
        return _Tail(least - until, at_end, latest, within)

    def hop(self, a: str, b: str) -> Hop:
        """Return each place as a cut between two neighbouring devices."""
        if (a, b) not in self._hop_between:
            cluster = self.setting.cluster
            ends = (cluster.device[name].overheads for name in (a, b))
            key = (cluster.link(a, b), bytes_per_s(cluster, a, b), *ends)
            if key not in self._hops:
                crossing, micro = self.line.crossing, self.setting.micro_batches
                self._hops[key] = hop_of(cluster, a, b, crossing, micro)
            self._hop_between[a, b] = self._hops[key]
        return self._hop_between[a, b]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The stages from one on: for each first place, the least sum; where the first of them ends."""

    sum_s: Array
    at_end: Array
    lasts: Numbers
    allowed: NDArray[np.bool_] | None

    def end(self, first: int) -> int:
        """Return the end of the first stage, the earliest of equals."""
        after = int(self.lasts[first]) + 1
        at_end = self.at_end[first + 1 : after]
        if self.allowed is not None:
            at_end = np.where(self.allowed[first, first + 1 : after], at_end, np.inf)
        return first + 1 + int(at_end.argmin())


def least_busy_s(seconds: Array) -> float:
    """Return a lower bound of the largest load, however units are spread: [device, unit].

    By weak duality, for weights y_d that add up to 1, the mean load is at least the sum over units
    of min_d y_d t_ud. The largest load is no less. y_d goes by speed.
    """
    if seconds.shape[1] == 0:
        return 0.0
    speed = 1.0 / np.maximum(seconds.sum(axis=1), 1e-300)
    shares = speed / speed.sum()
    return float(max((seconds * shares[:, None]).min(axis=0).sum(), seconds.min(axis=0).max()))


def range_minima(values: Array, firsts: Numbers, lasts: Numbers) -> Array:
    """Return the least of values[first : last + 1] for every range; infinity for an empty one.

    A sparse table: row k has the least of each 2^k neighbours.
    """
    count = len(values)
    lasts = np.minimum(lasts, count - 1)
    lengths = lasts - firsts + 1
    level_of = np.frexp(np.maximum(lengths, 1))[1] - 1
    table = np.full((int(level_of.max()) + 1, count), np.inf)
    table[0] = values
    for level in range(1, len(table)):
        half = 1 << (level - 1)
        np.minimum(table[level - 1, :-half], table[level - 1, half:], out=table[level, :-half])
    starts = np.minimum(firsts, count - 1)
    seconds = np.maximum(lasts - (1 << level_of) + 1, 0)
    found = np.minimum(table[level_of, starts], table[level_of, seconds])
    least: Array = np.where(lengths > 0, found, np.inf)
    return least


LEAST, MORE, PRECISION = 0.9, 1.4, 1.01
"""Of every device's memory: shares from which on the least is sought, and how exactly."""


def nearest(
    line: Line, setting: Setting, sequences: Iterable[Sequence[str]], most: float = MORE
) -> Iterator[tuple[float, Split]]:
    """Yield, for each sequence, the share of memory with which a split fits, and the split.

    The memory of a piece is an upper bound only: a split that needs a little more memory may fit.
    """
    for sequence in sequences:
        solve = partial(_within_share, line, setting, sequence)
        low, high = LEAST, MORE
        split = solve(high)
        while split is None and high < most:
            low, high = high, 2 * high
            split = solve(high)
        if split is None:
            continue
        while high / low > PRECISION:
            middle = (low * high) ** 0.5
            closer = solve(middle)
            low, high = (middle, high) if closer is None else (low, middle)
            split = closer or split
        yield high, split


def _within_share(
    line: Line, setting: Setting, sequence: Sequence[str], share: float
) -> Split | None:
    return Cutter(line, replace(setting, memory_scale=share)).solve(sequence, np.inf)


# ------------------------------------------------------------------------------------------------
# Sequences of devices x limits on the busiest -> the best split, and those met on the way.
#
# Best-first over intervals of `most_s`, for all sequences at once. In an interval (low, high) no
# step is shorter than (least sum under `high`) + (M - 1) low; the one with the least bound is
# halved next, until that bound is within a gap of the best split found.
#
# Source: Alpa (Zheng et al., OSDI'22, section 5.2) scans the limits; here the search proves its
# gap.


_LESS = 1e-12
"""Of a step: what rounds."""
_NARROW = 1e-9  # an interval of no width: well above what solvers round by


class _Open(NamedTuple):
    """An interval of `most_s` in which no step is below the bound; no end: nothing is solved."""

    bound_s: float
    number: int
    low_s: float
    high_s: float
    sum_s: float
    sequence: Sequence[str]


class BestFirst:
    """One search: mutable; `run` again without sequences goes on where it stopped.

    Args:
        cutter: the units in one order.
        best: a split that is known already; what cannot be better is not looked at.

    Attributes:
        best: the split of least step, of those met and that one.
        met: every split, by sequence and cuts, in the order in which they were met.
        compared: how many times a sequence was solved or an interval halved.
    """

    def __init__(self, cutter: Cutter, best: Split | None = None) -> None:
        self.cutter, self.best, self.compared = cutter, best, 0
        self.met: dict[tuple[tuple[str, ...], tuple[int, ...]], Split] = {}
        self._more = cutter.setting.micro_batches - 1
        self._heap: list[_Open] = []

    def run(
        self, sequences: Iterable[Sequence[str]], gap: float, most_steps: int, eager_steps: int = 0
    ) -> None:
        """Search.

        Args:
            sequences: the devices along the pipeline, the best looking first.
            gap: 0.001: to a thousandth.
            most_steps: stages that may be solved; reaching it is no error.
            eager_steps: of these, for the best split of each sequence, whatever its bound; later
                ones are left out. With 0 a sequence is solved when its bound is the least.
        """
        for sequence in sequences:
            low_s = self.cutter.least_busy_s(sequence)
            if self.cutter.steps < eager_steps:
                self._solve(low_s, np.inf, sequence)
            elif not eager_steps:
                self._open(low_s, np.inf, self.cutter.least_sum_s(sequence), sequence)
        while self._heap and self.cutter.steps < most_steps and not self._is_proven(gap):
            top = heapq.heappop(self._heap)
            if top.high_s == np.inf:
                self._solve(top.low_s, np.inf, top.sequence)
            elif top.high_s > top.low_s * (1 + _NARROW):  # else the split known is the best there
                middle_s = (top.low_s + top.high_s) / 2
                self._solve(top.low_s, middle_s, top.sequence)
                self._open(middle_s, top.high_s, top.sum_s, top.sequence)

    def _is_proven(self, gap: float) -> bool:
        return self.best is not None and self._heap[0].bound_s >= self._step_s(self.best) * (
            1 - gap - _LESS
        )

    def _step_s(self, split: Split) -> float:
        return split.sum_s + self._more * split.most_s

    def _solve(self, low_s: float, limit_s: float, sequence: Sequence[str]) -> None:
        split = self.cutter.solve(sequence, limit_s)
        if split is None:
            return
        self.met.setdefault((split.sequence, split.cuts), split)
        if self.best is None or self._step_s(split) < self._step_s(self.best) * (1 - _LESS):
            self.best = split
        self._open(low_s, split.most_s, split.sum_s, sequence)

    def _open(self, low_s: float, high_s: float, sum_s: float, sequence: Sequence[str]) -> None:
        self.compared += 1
        bound_s = sum_s + self._more * low_s
        entry = _Open(bound_s, self.compared, low_s, high_s, sum_s, sequence)
        heapq.heappush(self._heap, entry)
