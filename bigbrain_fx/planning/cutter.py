"""A line's best cuts into one piece per device, by dynamic programming.

For a sequence of devices and a limit on how long each device and link may be busy, it minimises

    sum of all stages' times and round trips + (micro_batches - 1) x the busiest device or link

It knows no schedule: what is in flight is given.

Source: planners.md 4; Alpa (Zheng et al., OSDI'22, section 5.2), with links as resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.search.line import Line, Setting, Split
from bigbrain_fx.search.work import Array, Numbers

_ROUNDING = 1.0 + 1e-12
_HALVINGS = 18


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
