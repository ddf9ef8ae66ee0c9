"""Lower bounds of a step: how far from the best any plan can be. It knows no schedule.

Two kinds, for two classes of plans:

    every plan          max(micro_batches x work / all devices together, the longest path)
    one piece a device  of a given order of the units, with head_s what comes before a stage:
                        min over splits of the largest head_s + M t_s, and of sum (t_j + c_j)

where a stage's head is the time in which its first micro-batch comes from the stages before it and
its last goes back through them. Stages may run side by side (towers), so the head counts only
stages with a gate: a unit on which all that come after it depend. A stage needs what the last gate
before it made, and the gate's stage needs its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster
from bigbrain_fx.planning import Array, Numbers, Work, least_busy_s

MOST_WORK = 4e7  # pairs of runs of places x states of the devices; some 20 ns each
_FEWEST_RUNS = 16


def bound_of_all(work: Work, cluster: Cluster, micro_batches: int) -> float:
    """Return seconds that no plan of any kind goes below, for this number of micro-batches."""
    names = [device.name for device in cluster.devices]
    step_s = min(device.overheads.step_s for device in cluster.devices)
    if work.count == 0:
        return step_s
    seconds = np.stack([_unit_s(work, name, micro_batches) for name in names])
    return step_s + max(micro_batches * least_busy_s(seconds), _longest_path_s(work, names))


def _unit_s(work: Work, device: str, micro_batches: int) -> Array:
    on = work.on[device]
    found: Array = on.forward_s + on.backward_s + on.once_s / micro_batches
    return found


def _longest_path_s(work: Work, names: Sequence[str]) -> float:
    """Return the longest path through the units, there and back, each on its fastest device."""
    forward = np.stack([work.on[name].forward_s for name in names]).min(axis=0)
    both = np.stack([work.on[n].forward_s + work.on[n].backward_s for n in names]).min(axis=0)
    ends_forward, ends_both = np.zeros(work.count), np.zeros(work.count)
    makers: list[list[int]] = [[] for _ in range(work.count)]
    graded: list[list[int]] = [[] for _ in range(work.count)]
    for value in work.values:
        for reader in value.readers:
            makers[reader].append(value.maker)
        for reader in work.flows(value):
            graded[reader].append(value.maker)
    for unit in range(work.count):
        before = max((ends_forward[maker] for maker in makers[unit]), default=0.0)
        ends_forward[unit] = before + forward[unit]
        before = max((ends_both[maker] for maker in graded[unit]), default=0.0)
        ends_both[unit] = before + both[unit]
    return float(max(ends_forward.max(), ends_both.max()))


def bound_of_chains(
    work: Work, order: Sequence[int], cluster: Cluster, micro_batches: int
) -> float | None:
    """Return seconds that no split of this order into one piece a device goes below.

    None where the devices are too many kinds, or the units too many, for it to be worked out.
    """
    grid = _Grid.of(work, order, cluster, micro_batches)
    return None if grid is None else grid.bound_s()


@dataclass(frozen=True)
class _Grid:
    """Dynamic programming over (places passed, devices used of each kind).

    Places are runs of places (`_Runs`); a stage's work counts from the last place of the run where
    it begins to the first of the run where it ends, which is never too much.

    Attributes:
        load_s: kind -> seconds per micro-batch, [first run, run after].
        once_s: likewise, what is done once a step, when a stage's gradients are on their way back
            already: so it counts for its device, and not for what comes after.
        counts: how many devices there are of each kind.
        trip_s: the least time of a message there and back, for each run as a cut.
        bound: [first run, run after]: whether the stage surely waits for the last gate before it.
        gated: likewise, whether it surely has a gate.
    """

    load_s: Sequence[Array]
    once_s: Sequence[Array]
    counts: tuple[int, ...]
    trip_s: Array
    bound: NDArray[np.bool_]
    gated: NDArray[np.bool_]
    micro_batches: int
    step_s: float

    @staticmethod
    def of(work: Work, order: Sequence[int], cluster: Cluster, micro: int) -> _Grid | None:
        kinds: dict[tuple[object, ...], list[str]] = {}
        for device in cluster.devices:
            kinds.setdefault((id(work.on[device.name]),), []).append(device.name)
        counts = tuple(len(names) for names in kinds.values())
        transitions = int(np.prod([count + 1 for count in counts])) * len(counts)
        most = int((MOST_WORK / transitions) ** 0.5)
        if work.count == 0 or most < _FEWEST_RUNS:
            return None
        on = [work.on[names[0]] for names in kinds.values()]
        each_s = [(kind.forward_s + kind.backward_s)[list(order)] for kind in on]
        once_s = [kind.once_s[list(order)] for kind in on]
        runs = _Runs.of(np.max([*each_s, *once_s], axis=0), most)
        line = _Trunk.of(work, order)
        gates = line.gates_before[runs.first][None, :] - line.gates_before[runs.last][:, None]
        needs = np.searchsorted(runs.first, line.next_trunk[runs.last] + 1)
        return _Grid(
            load_s=[runs.pieces(each) for each in each_s],
            once_s=[runs.pieces(each) for each in once_s],
            counts=counts,
            trip_s=np.minimum.reduceat(line.trip_s(cluster), runs.first),
            bound=np.arange(len(runs.first))[None, :] >= needs[:, None],
            gated=gates > 0,
            micro_batches=micro,
            step_s=min(device.overheads.step_s for device in cluster.devices),
        )

    def bound_s(self) -> float:
        """Return the bound.

        For each state and run: the least head of a stage that begins there, and the least that the
        stages before it take.
        """
        size = len(self.trip_s)
        zero = (0,) * len(self.counts)
        head, most = {zero: _start(size)}, {zero: _start(size)}
        best = np.inf
        for state in _states(self.counts):
            head[state], most[state] = np.full(size, np.inf), np.full(size, np.inf)
            for kind, before in _steps(state):
                self._add(head[before], most[before], kind, head[state], most[state])
            best = min(best, max(head[state][-1], most[state][-1]))
        return float(best) + self.step_s

    def _add(self, head: Array, most: Array, kind: int, to_head: Array, to_most: Array) -> None:
        known = np.flatnonzero(np.isfinite(head))
        if len(known) == 0:
            return
        first = int(known[0])  # nothing that begins there or later ends before it
        rows: Numbers | slice = slice(first, None)
        if len(known) < len(head) - first:
            rows = known
        load, apart, alone = (each[rows, first:] for each in self._pieces[kind])
        waits = np.where(self.bound[rows, first:], (head + self.trip_s)[rows, None], 0.0)
        begins = head[rows, None] + apart
        ends = np.where(self.gated[rows, first:], waits + load, begins)
        np.maximum(waits, self.once_s[kind][rows, first:], out=waits)
        waits += alone
        busy = np.maximum(most[rows, None], waits, out=waits)
        np.minimum(to_head[first:], ends.min(axis=0), out=to_head[first:])
        np.minimum(to_most[first:], busy.min(axis=0), out=to_most[first:])

    @cached_property
    def _pieces(self) -> Sequence[tuple[Array, Array, Array]]:
        """Kind -> its load with infinity for what is no piece; only that infinity; M loads."""
        later = _later(len(self.trip_s))
        loads = [np.where(later, load, np.inf) for load in self.load_s]
        return [
            (load, np.where(np.isfinite(load), 0.0, np.inf), self.micro_batches * load)
            for load in loads
        ]


def _later(size: int) -> NDArray[np.bool_]:
    return np.triu(np.ones((size, size), dtype=bool))


def _start(places: int) -> Array:
    found = np.full(places, np.inf)
    found[0] = 0.0
    return found


def _states(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    every = product(*(range(count + 1) for count in counts))
    return iter(sorted((state for state in every if sum(state)), key=sum))


def _steps(state: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for kind, used in enumerate(state):
        if used:
            yield kind, tuple(n - (k == kind) for k, n in enumerate(state))


# --------------------------------------------------------------------------- the line


@dataclass(frozen=True)
class _Runs:
    """Neighbouring places taken as one: the first and the last of each run."""

    first: Numbers
    last: Numbers

    @staticmethod
    def of(unit_s: Array, most: int) -> _Runs:
        """Make runs of places between which there is no work; of little, until `most` are left."""
        until = np.concatenate(([0.0], np.cumsum(unit_s)))
        level = until
        if len(np.unique(until)) > most - 2:
            level = np.floor(until / until[-1] * (most - 3))
        inner = np.diff(level[1:-1]) != 0
        starts = np.flatnonzero(np.concatenate(([True, True], inner, [True])))
        starts = starts[starts < len(until)]
        return _Runs(starts, np.append(starts[1:] - 1, len(until) - 1))

    def pieces(self, unit_s: Array) -> Array:
        """Return what surely lies between each run and each later one."""
        until = np.concatenate(([0.0], np.cumsum(unit_s)))
        found: Array = until[self.first][None, :] - until[self.last][:, None]
        np.maximum(found, 0.0, out=found)
        return found


@dataclass(frozen=True)
class _Trunk:
    """What depends on what along one order.

    Attributes:
        gates_before: place -> how many units before it all later ones of the trunk depend on.
        next_trunk: place -> the first unit of the trunk from there on. The trunk is the first unit
            and all that depends on it, with gradients in training.
        least_bytes: place -> of the values of the trunk that cross it, the smallest.
        trains: whether gradients come back.
    """

    gates_before: Numbers
    next_trunk: Numbers
    least_bytes: Array
    trains: bool

    @staticmethod
    def of(work: Work, order: Sequence[int]) -> _Trunk:
        at = {unit: place for place, unit in enumerate(order)}
        edges: list[list[tuple[int, int]]] = [[] for _ in order]
        for value in work.values:
            for reader in work.flows(value):
                edges[at[reader]].append((at[value.maker], value.nbytes))
        count = len(order)
        latest = np.full(count, -1)
        latest[:1] = 0
        for unit in range(1, count):
            latest[unit] = max((m for m, _ in edges[unit] if latest[m] >= 0), default=-1)
        in_trunk = latest >= 0
        needs = np.where(in_trunk, latest, count)
        later = np.append(np.minimum.accumulate(needs[::-1])[::-1][1:], count)
        gates = in_trunk & (later >= np.arange(count))
        found = np.where(in_trunk, np.arange(count), count)
        following = np.append(np.minimum.accumulate(found[::-1])[::-1], count)
        least = _least_crossing(edges, in_trunk)
        return _Trunk(np.concatenate(([0], np.cumsum(gates))), following, least, work.trains)

    def trip_s(self, cluster: Cluster) -> Array:
        """Return the least time in which a value goes there, and its gradient back."""
        names = [device.name for device in cluster.devices]
        links = [cluster.link(a, b) for a in names for b in names if a != b]
        if not links:
            return np.zeros(len(self.least_bytes))
        ways = 2 if self.trains else 1
        latency_s = min(link.latency_s for link in links)
        per_s = max(link.bytes_per_s for link in links)
        crossed = np.isfinite(self.least_bytes)
        return np.where(crossed, ways * (latency_s + self.least_bytes / per_s), 0.0)


def _least_crossing(
    edges: Sequence[Sequence[tuple[int, int]]], in_trunk: NDArray[np.bool_]
) -> Array:
    """Return, for each place, the bytes of the smallest value of the trunk that crosses it."""
    found = np.full(len(edges) + 1, np.inf)
    spans = sorted(
        (nbytes, maker + 1, reader + 1)
        for reader, makers in enumerate(edges)
        for maker, nbytes in makers
        if in_trunk[maker] and in_trunk[reader]
    )
    following = list(range(len(edges) + 2))  # the next place that nothing smaller crosses

    def next_free(place: int) -> int:
        while following[place] != place:
            following[place] = following[following[place]]
            place = following[place]
        return place

    for nbytes, first, after in spans:
        place = next_free(first)
        while place < after:
            found[place] = nbytes
            following[place] = place + 1
            place = next_free(place)
    return found
