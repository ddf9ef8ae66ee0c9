"""`differentiable`: contiguous splits by gradient descent through a soft dynamic program.

Source: the soft dynamic program of Mensch and Blondel (ICML 2018); see `soft_dp`. There is no
published planner to compare with; a dynamic program without a temperature is exact on the same
splits, so this finds no better chain, and says how near it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import (
    Cutter,
    InFlight,
    Line,
    Setting,
    Work,
    canonical,
    device_orders,
    least_busy_s,
    unit_orders,
)
from partitioners.coarse import blocks, quiet_cuts
from partitioners.improve import COLD, Improving, improved
from partitioners.judge import Homes, Judge, require_micro_batches
from partitioners.soft_dp import Pipeline, most_likely, soft_step
from partitioners.starts import start_of

_MOST_CELLS = 300_000  # stages x units x units of one soft program
_FEW_UNITS, _MOST_UNITS = 40, 160
_SEQUENCES, _DESCENDED = (
    200,
    4,
)  # orders of devices looked at, and those with a descent of their own
_HOT, _COLD = 0.3, 0.001  # temperature at first and last, in shares of a mean stage
_RATE = 0.3  # the limit's first step, in shares of a mean stage
_BEGINS = (1.0, 1.6)  # the limit at first, in least possible loads
_JUDGED = 6


@dataclass(frozen=True)
class Differentiable:
    """Descend on a smooth step time, round its likely cuts to a split that fits, improve that.

    The smooth time is a function of a limit on the busiest stage or link, and of a temperature that
    falls; its gradient comes with the chances of every cut. The most likely cuts among splits that
    fit make a split; single moves then improve the best of these and of the start, scored as the
    simulator would. Memory is a hard limit: see `room`.

    Attributes:
        micro_batches: per step.
        in_flight: as in `chain-dp`.
        seed: of the moves at the end.
        descent: steps of the gradient, for each order of devices.
        proposals: moves tried at the end.
        unaided: compare with an equal split, not with chain-dp's: what the method finds by itself.
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    descent: int = 40
    proposals: int = 1000
    unaided: bool = False
    name = "differentiable"

    def __post_init__(self) -> None:
        require_micro_batches(self.micro_batches)

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        judge = Judge(graph, canonical(cluster, costs), costs, self.micro_batches, self.in_flight)
        if not judge.known.groups:
            return judge.placement((), "nothing to split")
        start, _ = start_of(judge, self.unaided)
        rounded = judge.best(self._rounded(judge))
        best = judge.best([start, *([rounded] if rounded else [])]) or start
        search = Improving(self.proposals, self.seed, walks=2, heat=COLD)
        found = improved(judge, best, search)
        return judge.placement(found, self._reason(judge, rounded, start, found))

    def _reason(self, judge: Judge, rounded: Homes | None, start: Homes, found: Homes) -> str:
        alone = f"{judge.step_s(rounded):.4g} s" if rounded else "no split that fits"
        origin = "an equal split" if self.unaided else "a split by chain-dp"
        return (
            f"on {judge.used(found)}: about {judge.step_s(found):.4g} s a step; the soft program's "
            f"likely cuts gave {alone}, {origin} {judge.step_s(start):.4g} s, and the better of "
            f"them was improved by {self.proposals} proposals (seed {self.seed})"
        )

    def _rounded(self, judge: Judge) -> list[Homes]:
        """Return the best splits that the descents met, by the chain's objective."""
        met: dict[Homes, float] = {}
        for road in self._roads(judge):
            for cuts in self._descended(road.pipeline):
                met.setdefault(road.homes(cuts), road.pipeline.step_s(cuts))
        return sorted(met, key=lambda homes: met[homes])[:_JUDGED]

    def _roads(self, judge: Judge) -> list[_Road]:
        """Return the orders of units and devices that look best with few units, at some heat."""
        ranked: list[tuple[float, tuple[int, ...], tuple[str, ...]]] = []
        sequences: list[tuple[str, ...]] = []
        for order in unit_orders(len(judge.known.groups), judge.known.edges):
            line = _Shortened(judge, order, _FEW_UNITS)
            sequences = sequences or line.sequences(_SEQUENCES)
            for sequence in sequences:
                if len(sequence) <= line.count:
                    pipeline = line.road(sequence, self.micro_batches, self.in_flight).pipeline
                    soft = soft_step(pipeline, _least_s(pipeline), _HOT * _stage_s(pipeline))
                    ranked.append((soft.value_s if soft else np.inf, order, sequence))
        ranked.sort(key=lambda entry: entry[0])
        return [
            _Shortened(judge, order, _units(len(sequence))).road(
                sequence, self.micro_batches, self.in_flight
            )
            for _, order, sequence in ranked[:_DESCENDED]
        ]

    def _descended(self, pipeline: Pipeline) -> Iterator[tuple[int, ...]]:
        """Yield splits along descents: the most likely that fit, as it gets colder."""
        stage_s, more = _stage_s(pipeline), max(1, self.micro_batches - 1)
        for begin in _BEGINS:
            limit_s = begin * _least_s(pipeline)
            for step in range(self.descent):
                cold = step / max(1, self.descent - 1)
                heat_s = _HOT * (_COLD / _HOT) ** cold * stage_s
                soft = soft_step(pipeline, limit_s, heat_s)
                if soft is None:
                    return
                pull = float(np.clip(soft.by_limit / more, -1.0, 1.0))
                limit_s = max(0.0, limit_s - _RATE * (1.0 - 0.95 * cold) * stage_s * pull)
                cuts = most_likely(pipeline, soft.cuts)
                if cuts is not None:
                    yield cuts


@dataclass(frozen=True)
class _Road:
    """A pipeline, and how its cuts become devices of the graph's units."""

    pipeline: Pipeline
    order: tuple[int, ...]
    runs: tuple[range, ...]
    devices: tuple[int, ...]

    def homes(self, cuts: Sequence[int]) -> Homes:
        """Return the device of every unit."""
        found = [0] * len(self.order)
        for stage, device in enumerate(self.devices):
            for run in self.runs[cuts[stage] : cuts[stage + 1]]:
                for position in run:
                    found[self.order[position]] = device
        return tuple(found)


class _Shortened:
    """The units in one order, neighbours made one, for pipelines over any devices."""

    def __init__(self, judge: Judge, order: tuple[int, ...], most: int) -> None:
        self.judge, self.order = judge, order
        ordered = judge.known.reordered(order)
        self._runs = blocks(quiet_cuts(ordered, most))
        self._known: Work = ordered.merged(self._runs)
        self.count = len(self._runs)
        self._line = Line(self._known, range(self.count), self.count)

    def sequences(self, most: int) -> list[tuple[str, ...]]:
        """Return the orders of devices that look best."""
        return list(
            device_orders(self.judge.cluster, most, self._line.rough(self.judge.micro_batches))[
                :most
            ]
        )

    def road(self, sequence: tuple[str, ...], micro_batches: int, in_flight: InFlight) -> _Road:
        """Return the pipeline over these devices."""
        number = {device.name: i for i, device in enumerate(self.judge.cluster.devices)}
        setting = Setting(self.judge.cluster, micro_batches, in_flight=in_flight)
        cutter = Cutter(self._line, setting)
        hops = [cutter.hop(a, b) for a, b in pairwise(sequence)]
        none = np.zeros((0, self.count + 1))
        pipeline = Pipeline(
            np.stack([cutter.unit_s(device) for device in sequence]),
            np.stack(
                [
                    self._fits(device, setting.flight(s, len(sequence)), setting)
                    for s, device in enumerate(sequence)
                ]
            ),
            np.stack([hop.round_trip_s for hop in hops]) if hops else none,
            np.stack([hop.wire_s for hop in hops]) if hops else none,
            micro_batches,
        )
        devices = tuple(number[device] for device in sequence)
        return _Road(pipeline, self.order, tuple(self._runs), devices)

    def _fits(self, device: str, in_flight: int, setting: Setting) -> NDArray[np.bool_]:
        """Return [first, after]: whether the piece is one, and the device can hold it."""
        pieces = ~np.tri(self.count, self.count + 1, dtype=bool)
        needed = self._line.bytes_needed(device, in_flight, setting)[:-1]
        return np.asarray(pieces & (needed <= setting.memory_bytes(device)), dtype=np.bool_)


def _units(stages: int) -> int:
    """Return how finely a line is cut for so many stages."""
    affordable = int((_MOST_CELLS / stages) ** 0.5)
    return max(stages, min(_MOST_UNITS, affordable))


def _least_s(pipeline: Pipeline) -> float:
    return least_busy_s(pipeline.unit_s)


def _stage_s(pipeline: Pipeline) -> float:
    """Return what a stage takes on average; above 0."""
    return max(float(pipeline.unit_s.mean(axis=0).sum()) / pipeline.stages, 1e-12)
