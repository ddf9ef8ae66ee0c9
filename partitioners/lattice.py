"""All ideals of a graph's units -> the best contiguous split for one sequence of devices.

What `line` is for one order of the units, this is for every order at once: a stage is what lies
between two ideals. It knows nothing of which sequences and limits to try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import (
    AHEAD,
    Array,
    Crossing,
    Hop,
    InFlight,
    Split,
    Value,
    Work,
    hop_of,
    in_flight_at,
    least_busy_s,
)
from partitioners.footprint import extra_ties
from partitioners.ideals import Sets, states, within

_ROUNDING = 1.0 + 1e-12
Matrix = NDArray[np.float64]  # [smaller ideal, larger ideal]


class Lattice:
    """The ideals, with all that is independent of the split worked out once.

    Splits that it returns have ideals, by number, for cuts; `order` makes units of them.
    """

    def __init__(
        self,
        known: Work,
        sets: Sets,
        cluster: Cluster,
        micro_batches: int,
        in_flight: InFlight = None,
    ) -> None:
        self.known, self.sets, self.cluster = known, sets, cluster
        self.micro_batches, self.in_flight, self.steps = micro_batches, in_flight, 0
        self.unit_s = {
            d: known.seconds[d] + known.once_s[d] / micro_batches for d in sorted(known.seconds)
        }
        self._until_s = {d: sets @ each for d, each in self.unit_s.items()}
        self._fits: dict[tuple[object, ...], Sets] = {}
        self._hops: dict[tuple[str, str], Hop] = {}
        self._tails: dict[tuple[object, ...], Array] = {}
        self._tails_limit_s = -1.0

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`."""
        return least_busy_s(np.stack([self.unit_s[d] for d in sequence]))

    def least_sum_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `sum_s`: every unit where it takes least."""
        return float(np.stack([self.unit_s[d] for d in sequence]).min(axis=0).sum())

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None when there is none."""
        if len(sequence) > len(self.known.groups):
            return None
        self.steps += len(sequence)
        if limit_s != self._tails_limit_s:  # sequences share their ends, for one limit
            self._tails, self._tails_limit_s = {}, limit_s
        if not np.isfinite(self._tail(sequence, 0, limit_s)[0]):
            return None
        return self._walk(sequence, limit_s)

    def order(self, split: Split) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the units in the order of a split's stages, and where its cuts are in that."""
        each = [self.sets[b] & ~self.sets[a] for a, b in pairwise(split.cuts)]
        units = [np.flatnonzero(stage).tolist() for stage in each]
        cuts = np.cumsum([0, *(len(stage) for stage in units)]).tolist()
        return tuple(unit for stage in units for unit in stage), tuple(cuts)

    def _tail(self, sequence: Sequence[str], stage: int, limit_s: float) -> Array:
        """Return, for every ideal, the least sum of a pipeline of what is not in it."""
        flights = tuple(self._flight(sequence, s) for s in range(stage, len(sequence)))
        key = (tuple(sequence[stage:]), flights)
        if key not in self._tails:
            until_s = self._until_s[sequence[stage]]
            at_end = self._at_end(sequence, stage, limit_s)
            ends = np.flatnonzero(np.isfinite(at_end))
            in_time = until_s[ends][None, :] <= until_s[:, None] + limit_s * _ROUNDING
            allowed = in_time & self._fitting(sequence, stage)[:, ends]
            least = np.where(allowed, at_end[ends][None, :], np.inf).min(axis=1, initial=np.inf)
            self._tails[key] = least - until_s
        return self._tails[key]

    def _at_end(self, sequence: Sequence[str], stage: int, limit_s: float) -> Array:
        """Return what everything from a stage's end on costs, for each ideal that it may end at."""
        until_s = self._until_s[sequence[stage]]
        if stage == len(sequence) - 1:
            last = np.full(len(self.sets), np.inf)
            last[-1] = until_s[-1]
            return last
        hop = self._hop(sequence[stage], sequence[stage + 1])
        tail = self._tail(sequence, stage + 1, limit_s)
        at_end: Array = until_s + hop.round_trip_s + tail
        at_end[hop.wire_s > limit_s * _ROUNDING] = np.inf
        return at_end

    def _walk(self, sequence: Sequence[str], limit_s: float) -> Split:
        """Follow the minima from the empty ideal on; of equal ends the first is taken."""
        cuts, sum_s, most_s = [0], 0.0, 0.0
        for stage, device in enumerate(sequence):
            first, until_s = cuts[-1], self._until_s[device]
            at_end = self._at_end(sequence, stage, limit_s)
            at_end[~self._fitting(sequence, stage)[first]] = np.inf
            at_end[until_s > until_s[first] + limit_s * _ROUNDING] = np.inf
            cuts.append(int(np.argmin(at_end)))
            load_s = float(until_s[cuts[-1]] - until_s[first])
            sum_s, most_s = sum_s + load_s, max(most_s, load_s)
            if stage < len(sequence) - 1:
                hop = self._hop(device, sequence[stage + 1])
                sum_s += float(hop.round_trip_s[cuts[-1]])
                most_s = max(most_s, float(hop.wire_s[cuts[-1]]))
        return Split(tuple(sequence), tuple(cuts), sum_s, most_s)

    # ------------------------------------------------------------------ bytes

    def _hop(self, a: str, b: str) -> Hop:
        if (a, b) not in self._hops:
            self._hops[a, b] = hop_of(self.cluster, a, b, self._crossing, self.micro_batches)
        return self._hops[a, b]

    @cached_property
    def _crossing(self) -> Crossing:
        """Return what goes between every ideal and the rest: values, gradients, shared weights."""
        found = np.zeros((5, len(self.sets)))
        for value in self.known.values:
            open_ = self.sets[:, value.maker] & ~self.sets[:, value.readers].all(axis=1)
            found[0] += value.nbytes * open_
            found[1] += value.gradient_bytes * open_
            found[2] += open_
            found[3] += (value.gradient_bytes > 0) * open_
        for weight in self.known.weights:
            read = self.sets[:, weight.readers]
            found[4] += weight.trained_bytes * (read.any(axis=1) & ~read.all(axis=1))
        return Crossing(*found)

    def _flight(self, sequence: Sequence[str], stage: int) -> int:
        return in_flight_at(stage, len(sequence), self.micro_batches, self.in_flight)

    def _fitting(self, sequence: Sequence[str], stage: int) -> Sets:
        """Return which pieces [from, to] a stage's device can hold."""
        device, flight = sequence[stage], self._flight(sequence, stage)
        memory = self.cluster.device[device].memory_bytes
        known = self.known
        saved, work = known.saved_bytes[device], known.workspace_bytes[device]
        key = (memory, flight, saved.tobytes(), work.tobytes())
        if key not in self._fits:
            self._fits[key] = self._pieces & (self.bytes_needed(device, flight) <= memory)
        return self._fits[key]

    @cached_property
    def _pieces(self) -> Sets:
        found = within(self.sets, self.sets)
        np.fill_diagonal(found, val=False)  # an empty stage is no stage
        return found

    def bytes_needed(self, device: str, in_flight: int) -> Matrix:
        """Return the bytes of the piece between two ideals on a device; see `footprint`."""
        flight = in_flight if self.known.trains else 1
        saved = self.sets @ self.known.saved_bytes[device]
        found: Matrix = self._once + flight * self._per_micro_batch
        found += self.known.kept(flight) * (saved[None, :] - saved[:, None])
        found += self._largest(self.known.workspace_bytes[device])
        return found

    @cached_property
    def _once(self) -> Matrix:
        known, devices = self.known, len(self.cluster.devices)
        found = self._messages(
            lambda v: (2 + AHEAD) * v.gradient_bytes + AHEAD * v.nbytes,
            lambda v: (1 + AHEAD) * v.gradient_bytes,
        )
        sums = _Products(len(self.sets))
        for weight in known.weights:
            nbytes = weight.nbytes + weight.trained_bytes * (2 + known.state_per_byte)
            nbytes += extra_ties(weight, devices)
            number = states(self.sets, weight.readers)
            found += nbytes  # read by the piece, unless both ideals have the same of its readers
            for state in range(int(number.max()) + 1):
                sums.add(-nbytes, number == state, number == state)
        return found + sums.total()

    @cached_property
    def _per_micro_batch(self) -> Matrix:
        return self._messages(lambda v: v.nbytes, lambda v: v.nbytes)

    def _messages(
        self, received: Callable[[Value], float], sent: Callable[[Value], float]
    ) -> Matrix:
        """Add up values that a piece receives, and values that it sends."""
        sums = _Products(len(self.sets))
        everything = np.ones(len(self.sets), dtype=bool)
        for value in self.known.values:
            made = self.sets[:, value.maker]
            number = states(self.sets, (value.maker, *value.readers))
            sums.add(received(value), made, everything)  # made before ...
            for state in np.unique(number[made]).tolist():  # ... and read here
                sums.add(-received(value), number == state, number == state)
            open_ = made & ~self.sets[:, value.readers].all(axis=1)
            sums.add(sent(value), ~made, open_)
        return sums.total()

    def _largest(self, each: Array) -> Matrix:
        """Return the largest entry of every piece, from that of the piece with one unit less."""
        number = {row.tobytes(): i for i, row in enumerate(self.sets)}
        found = np.zeros((len(self.sets), len(self.sets)))  # [larger, smaller]
        for larger, row in enumerate(self.sets):
            for unit in np.flatnonzero(row).tolist():
                less = row.copy()
                less[unit] = False
                if less.tobytes() in number:
                    piece = np.maximum(found[number[less.tobytes()]], each[unit])
                    found[larger] = np.where(self.sets[:, unit], found[larger], piece)
        return found.T


class _Products:
    """A sum over terms of constant x [smaller ideal is in a set] x [larger ideal is in a set]."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._left: list[NDArray[np.floating]] = []
        self._right: list[Sets] = []

    def add(self, constant: float, smaller: Sets, larger: Sets) -> None:
        """Add a term."""
        if constant:
            self._left.append(constant * smaller)
            self._right.append(larger)

    def total(self) -> Matrix:
        """Return the sum for every pair."""
        if not self._left:
            return np.zeros((self.count, self.count))
        right = np.array(self._right, dtype=np.float64)
        found: Matrix = np.array(self._left).T @ right
        return found
