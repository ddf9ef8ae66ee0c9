"""Units in one order -> the best contiguous split for one sequence of devices, under a time limit.

The heart of `chain_dp`: the sum of all times is minimised over splits in which no device and no
link is busy for longer than a limit. It knows nothing of which sequences and limits to try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster, Link
from partitioners.facts import Facts, Seconds
from partitioners.footprint import Pieces, in_flight_at

Indices = NDArray[np.intp]

_ROUNDING = 1.0 + 1e-12


@dataclass(frozen=True, slots=True)
class Split:
    """A contiguous split: stage s has units cuts[s] .. cuts[s + 1] - 1 and device sequence[s].

    `sum_s` is what one micro-batch takes, alone, through the whole pipeline and back; `most_s` what
    the busiest device or link spends on each.
    """

    sequence: tuple[str, ...]
    cuts: tuple[int, ...]
    sum_s: float
    most_s: float

    def step_s(self, micro_batches: int) -> float:
        """Return the objective: the first micro-batch alone, then one every `most_s`."""
        return self.sum_s + (micro_batches - 1) * self.most_s

    @property
    def device_of_unit(self) -> tuple[str, ...]:
        """Return one device per unit, in the order of the line."""
        sizes = np.diff(self.cuts)
        return tuple(d for d, size in zip(self.sequence, sizes, strict=True) for _ in range(size))


@dataclass(frozen=True, slots=True)
class Hop:
    """Every cut between two neighbouring devices: there and back, and the busier direction."""

    round_trip_s: Seconds
    wire_s: Seconds


def hop_of(
    link: Link, forward: Seconds, backward: Seconds, tied: Seconds, micro_batches: int
) -> Hop:
    """Return what crossing a link takes, per micro-batch, for the bytes at every cut.

    Args:
        link: between the two devices; the same both ways.
        forward: bytes of values.
        backward: bytes of their gradients.
        tied: bytes of gradients of shared weights, once a step each way.
        micro_batches: in one step.
    """
    there_s, back_s = forward / link.bytes_per_s, backward / link.bytes_per_s
    tied_s = tied / link.bytes_per_s / micro_batches
    latencies = (forward > 0) * 1.0 + (backward > 0) * 1.0
    round_trip_s = there_s + back_s + 2 * tied_s + latencies * link.latency_s
    return Hop(round_trip_s, np.maximum(there_s, back_s) + tied_s)


class Solver(Protocol):
    """What `best_split` searches: all splits for one sequence of devices."""

    micro_batches: int

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None: there is none."""
        ...

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`."""
        ...


@dataclass(frozen=True, slots=True)
class _Reach:
    """Which pieces a device can hold.

    From first unit i, every end up to `all_until[i]` fits. Beyond, some may (memory is not
    monotone: a longer piece may send less): these are listed in `ends`, those of
    i = rows[k] from `starts[k]` on.
    """

    all_until: Indices
    rows: Indices
    starts: Indices
    counts: Indices
    ends: Indices
    to_the_end: NDArray[np.bool_]


class Line:
    """The units in one order, with all that is independent of the split worked out once.

    Args:
        facts: with the units in the order of the pipeline.
        cluster: the devices and their links.
        micro_batches: in one step; work done once a step counts 1/micro_batches per micro-batch.
        in_flight: see `in_flight_at`.
        memory_scale: multiplies every device's memory.
    """

    def __init__(
        self,
        facts: Facts,
        cluster: Cluster,
        micro_batches: int,
        in_flight: int | tuple[int, ...] | None = None,
        memory_scale: float = 1.0,
    ) -> None:
        self.facts, self.cluster = facts, cluster
        self.micro_batches, self.in_flight = micro_batches, in_flight
        self.memory_scale = memory_scale
        self.count = len(facts.groups)
        self.unit_s = {
            d: facts.seconds[d] + facts.once_s[d] / micro_batches for d in sorted(facts.seconds)
        }
        self._until_s = {d: np.concatenate(([0.0], np.cumsum(s))) for d, s in self.unit_s.items()}
        self._forward_bytes, self._backward_bytes, self._tied_bytes = _crossing(facts)
        self._pieces = Pieces(facts, len(cluster.devices))
        self._hops: dict[tuple[str, str], Hop] = {}
        self._reaches: dict[tuple[object, ...], _Reach] = {}

    def hop_bytes(self, cut: int) -> tuple[int, int]:
        """Return the bytes of a micro-batch that cross a cut forward, and backward."""
        return int(self._forward_bytes[cut]), int(self._backward_bytes[cut])

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None when there is none.

        Dynamic programming from the last stage to the first: best[i] is the least sum of a
        pipeline of the remaining devices over units i, i + 1, ... For a stage, the ends that the
        limit allows are a range, so each step is a minimum over ranges: n log n.
        """
        if len(sequence) > self.count:
            return None
        tails = [self._last(sequence, limit_s)]
        for stage in range(len(sequence) - 2, -1, -1):
            tails.append(self._add_stage(sequence, stage, limit_s, tails[-1]))
        if not np.isfinite(tails[-1][0]):
            return None
        return self._walk(sequence, limit_s, tails[::-1])

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`."""
        return least_busy_s(np.stack([self.unit_s[d] for d in sequence]))

    def measure(self, sequence: Sequence[str], cuts: Sequence[int]) -> Split:
        """Return the split with these cuts and its times; memory is not looked at."""
        stages = range(len(sequence))
        loads = [self._load(sequence[s], cuts[s], cuts[s + 1]) for s in stages]
        hops = [(self.hop(sequence[s - 1], sequence[s]), cuts[s]) for s in stages[1:]]
        return Split(
            tuple(sequence),
            tuple(int(cut) for cut in cuts),
            sum(loads) + sum(float(hop.round_trip_s[cut]) for hop, cut in hops),
            max(*loads, *(float(hop.wire_s[cut]) for hop, cut in hops), 0.0),
        )

    def _load(self, device: str, first: int, after: int) -> float:
        return float(self._until_s[device][after] - self._until_s[device][first])

    def _last(self, sequence: Sequence[str], limit_s: float) -> Seconds:
        until_s = self._until_s[sequence[-1]]
        rest_s: Seconds = until_s[-1] - until_s
        fits = self._reach(sequence, len(sequence) - 1).to_the_end
        rest_s[:-1][~fits] = np.inf
        rest_s[rest_s > limit_s * _ROUNDING] = np.inf
        rest_s[-1] = np.inf  # an empty stage is no stage
        return rest_s

    def _add_stage(
        self, sequence: Sequence[str], stage: int, limit_s: float, tail: Seconds
    ) -> Seconds:
        until_s = self._until_s[sequence[stage]]
        at_end = self._at_end(sequence, stage, limit_s, tail)
        latest = np.searchsorted(until_s, until_s[:-1] + limit_s * _ROUNDING, side="right") - 1
        reach = self._reach(sequence, stage)
        firsts = np.arange(1, self.count + 1)
        least = np.append(
            _range_minimum(at_end, firsts, np.minimum(latest, reach.all_until)), np.inf
        )
        if len(reach.rows):
            allowed = reach.ends <= np.repeat(latest[reach.rows], reach.counts)
            fringe = np.where(allowed, at_end[reach.ends], np.inf)
            fringe = np.minimum.reduceat(fringe, reach.starts)
            least[reach.rows] = np.minimum(least[reach.rows], fringe)
        found: Seconds = least - until_s
        return found

    def _at_end(
        self, sequence: Sequence[str], stage: int, limit_s: float, tail: Seconds
    ) -> Seconds:
        """Return what everything from a stage's end on costs, for each end."""
        hop = self.hop(sequence[stage], sequence[stage + 1])
        at_end: Seconds = self._until_s[sequence[stage]] + hop.round_trip_s + tail
        at_end[hop.wire_s > limit_s * _ROUNDING] = np.inf
        return at_end

    def _walk(self, sequence: Sequence[str], limit_s: float, tails: Sequence[Seconds]) -> Split:
        """Follow the minima from the first unit on; of equal ends the earliest is taken."""
        cuts = [0]
        for stage in range(len(sequence) - 1):
            device, first = sequence[stage], cuts[-1]
            until_s = self._until_s[device]
            at_end = self._at_end(sequence, stage, limit_s, tails[stage + 1])
            at_end[: first + 1] = np.inf
            at_end[until_s > until_s[first] + limit_s * _ROUNDING] = np.inf
            at_end[~self._fitting_ends(self._reach(sequence, stage), first)] = np.inf
            cuts.append(int(np.argmin(at_end)))
        return self.measure(sequence, [*cuts, self.count])

    def _fitting_ends(self, reach: _Reach, first: int) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = np.arange(self.count + 1) <= reach.all_until[first]
        found = np.flatnonzero(reach.rows == first)
        for k in found:
            fits[reach.ends[reach.starts[k] : reach.starts[k] + reach.counts[k]]] = True
        return fits

    def hop(self, a: str, b: str) -> Hop:
        """Return every cut between two neighbouring devices."""
        if (a, b) not in self._hops:
            crossing = self._forward_bytes, self._backward_bytes, self._tied_bytes
            self._hops[a, b] = hop_of(self.cluster.link(a, b), *crossing, self.micro_batches)
        return self._hops[a, b]

    def _reach(self, sequence: Sequence[str], stage: int) -> _Reach:
        device = sequence[stage]
        flight = in_flight_at(stage, len(sequence), self.micro_batches, self.in_flight)
        memory = self.cluster.device[device].memory_bytes * self.memory_scale
        facts = self.facts
        key = (
            memory,
            flight,
            facts.saved_bytes[device].tobytes(),
            facts.workspace_bytes[device].tobytes(),
        )
        if key not in self._reaches:
            self._reaches[key] = _reach_of(self._pieces.bytes_needed(device, flight) <= memory)
        return self._reaches[key]


def least_busy_s(seconds: Seconds) -> float:
    """Return a lower bound of the largest load, by weak duality and by the dearest unit.

    However the units are spread, weights y_d that add up to 1 make the mean load, and so the
    largest, at least the sum over units of min_d y_d t_ud; y_d goes by speed.

    Args:
        seconds: [device, unit].
    """
    speed = 1.0 / np.maximum(seconds.sum(axis=1), 1e-300)
    shares = speed / speed.sum()
    return float(max((seconds * shares[:, None]).min(axis=0).sum(), seconds.min(axis=0).max()))


def _reach_of(fits: NDArray[np.bool_]) -> _Reach:
    """Sum up which pieces fit: `fits[first, after]`."""
    count = len(fits)
    triangle = np.tri(count, count + 1, dtype=bool)  # after <= first: no piece
    blocked = ~(fits | triangle)
    any_blocked = blocked.any(axis=1)
    all_until = np.where(any_blocked, blocked.argmax(axis=1) - 1, count)
    beyond = fits & ~triangle & (np.arange(count + 1)[None, :] > all_until[:, None])
    rows, ends = np.nonzero(beyond)
    found, starts, counts = np.unique(rows, return_index=True, return_counts=True)
    return _Reach(all_until, found, starts, counts, ends, fits[:, count].copy())


def _range_minimum(values: Seconds, firsts: Indices, lasts: Indices) -> Seconds:
    """Return min(values[first : last + 1]) for every range; infinity for an empty one."""
    lengths = lasts - firsts + 1
    level_of = np.frexp(np.maximum(lengths, 1))[1] - 1  # floor(log2)
    table = [values]
    for level in range(int(level_of.max())):
        half = 1 << level
        row = table[-1].copy()
        np.minimum(row[:-half], row[half:], out=row[:-half])
        table.append(row)
    stacked = np.stack(table)
    clipped = np.minimum(firsts, len(values) - 1)
    second = np.maximum(lasts - (1 << level_of) + 1, 0)
    found = np.minimum(stacked[level_of, clipped], stacked[level_of, second])
    return np.where(lengths > 0, found, np.inf)


def _crossing(facts: Facts) -> tuple[Seconds, Seconds, Seconds]:
    """Return the bytes that cross every cut: values, their gradients, gradients of tied weights.

    A value counts at each cut between its maker and its last reader, once; so does a tied weight
    between its first reader and its last.
    """
    spans = [(v.maker, v.readers[-1], v.nbytes, v.gradient_bytes, 0) for v in facts.values]
    spans += [(w.readers[0], w.readers[-1], 0, 0, w.trained_bytes) for w in facts.weights]
    found = np.zeros((3, len(facts.groups) + 1))
    for first, last, *nbytes in spans:
        found[:, first + 1] += nbytes
        found[:, last + 1] -= nbytes
    forward, backward, tied = found.cumsum(axis=1)
    return forward, backward, tied
