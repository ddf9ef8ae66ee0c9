"""`cp-sat`: any placement by integer programming, with a bound that is proven. An extra.

Source: Tarnawski et al., NeurIPS'20, section 5, without contiguity; solved by OR-tools' CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import Work, canonical, least_busy_s
from partitioners.clock import Timing
from partitioners.improve import MOST_UNITS, coarse
from partitioners.judge import Homes, Judge, require_micro_batches
from partitioners.least_step import MOST_RIDES, least_busiest, least_step, rides
from partitioners.room import Room
from partitioners.sat import cp_model
from partitioners.starts import good_start


@dataclass(frozen=True)
class CPSat:
    """Place ops anywhere so that a step is short, and prove how short it can be at best.

    Two integer programs: one minimises one micro-batch walked through unit by unit
    + (micro_batches - 1) x the busiest device or link, the other that busiest alone. Their
    placements and chain-dp's are compared as the simulator would. The second program's bound holds
    for every placement and every schedule: a step is at least micro_batches x the busiest. Devices
    may depend on each other in circles: the list scheduler runs such plans. Memory is a hard limit:
    see `room`.

    Attributes:
        micro_batches: per step.
        in_flight: as in `chain-dp`; on a device with several stages all micro-batches may be.
        seed: of the searches.
        work: limit of each program, in deterministic seconds (some seconds of one core).
    """

    micro_batches: int = 8
    in_flight: int | tuple[int, ...] | None = None
    seed: int = 0
    work: float = 10.0
    name = "cp-sat"
    needs = ("ortools",)

    def __post_init__(self) -> None:
        require_micro_batches(self.micro_batches)

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph.

        Raises:
            InputError: OR-tools is not installed.
            NoPlanError: no placement to begin with fits; with the arithmetic per device.
        """
        cp_model()
        judge = Judge(graph, canonical(cluster, costs), costs, self.micro_batches, self.in_flight)
        if not judge.known.groups:
            return judge.placement((), "nothing to split")
        start = good_start(judge)
        case = _SatCase.of(judge, start)
        if case is None:
            return judge.placement(start, self._too_large(judge, start))
        step = least_step(case.timing, case.room, case.start, self.work, self.seed)
        busy = least_busiest(case.timing, case.room, case.start, self.work, self.seed)
        met = [start, *(case.spread(h) for h in (step.homes, busy.homes) if h is not None)]
        best = judge.best(met) or start
        bound_s = _simple_bound_s(self._alone(judge))
        if costs.alone is None:  # the program's is of these costs
            bound_s = max(bound_s, self.micro_batches * case.proven(busy.bound_s))
        return judge.placement(best, self._reason(judge, best, bound_s))

    def bound_s(self, graph: Graph, cluster: Cluster, costs: Costs) -> float:
        """Return seconds that no step of any placement and any schedule is below.

        Raises:
            InputError: OR-tools is not installed.
        """
        cp_model()
        judge = Judge(
            graph,
            canonical(cluster, costs),
            costs.alone or costs,
            self.micro_batches,
            self.in_flight,
        )
        if not judge.known.groups:
            return 0.0
        start = (0,) * len(judge.known.groups)
        simple_s = _simple_bound_s(judge)
        case = _SatCase.of(judge, start)
        if case is None or not case.is_whole:
            return simple_s
        busy = least_busiest(case.timing, case.room, case.start, self.work, self.seed)
        return max(simple_s, self.micro_batches * busy.bound_s)

    def _alone(self, judge: Judge) -> Judge:
        """Return the judge of devices that nobody slows: bounds must hold for those, too."""
        alone = judge.costs.alone
        if alone is None:
            return judge
        return Judge(judge.graph, judge.cluster, alone, self.micro_batches, self.in_flight)

    def _reason(self, judge: Judge, homes: Homes, bound_s: float) -> str:
        step_s = judge.step_s(homes)
        gap = max(0.0, 1.0 - bound_s / step_s) if step_s else 0.0
        return (
            f"on {judge.used(homes)}: about {step_s:.4g} s a step at {self.micro_batches} "
            f"micro-batches; no placement takes less than {bound_s:.4g} s, {gap:.1%} below"
        )

    def _too_large(self, judge: Judge, homes: Homes) -> str:
        bound_s = _simple_bound_s(self._alone(judge))
        return (
            f"{self._reason(judge, homes, bound_s)}; the chain-dp split, for an integer program of "
            f"{len(judge.cluster.devices)} devices and this graph would be too large"
        )


@dataclass(frozen=True)
class _SatCase:
    """A graph made small enough for a program: runs of units as one."""

    runs: list[range]
    start: list[int]
    timing: Timing
    room: Room

    @staticmethod
    def of(judge: Judge, start: Homes) -> _SatCase | None:
        """Return the finest case that a program can take; None when even few runs are too many."""
        most = MOST_UNITS
        while most >= len(judge.cluster.devices):
            runs, known = coarse(judge.known, start, most)
            timing = Timing(known, judge.cluster, judge.micro_batches)
            if rides(timing) <= MOST_RIDES:
                room = Room(known, judge.cluster, judge.micro_batches, judge.in_flight)
                return _SatCase(runs, [start[run[0]] for run in runs], timing, room)
            most //= 2
        return None

    @property
    def is_whole(self) -> bool:
        """Whether every unit stands for itself, so that a bound is one of the graph's."""
        return all(len(run) == 1 for run in self.runs)

    def proven(self, bound_s: float) -> float:
        """Return a program's bound if it is one of the graph's, else 0."""
        return bound_s if self.is_whole else 0.0

    def spread(self, homes: Homes) -> Homes:
        """Return the device of every unit."""
        return tuple(home for run, home in zip(self.runs, homes, strict=True) for _ in run)


def _simple_bound_s(judge: Judge) -> float:
    """Return what no step is below without solving anything: work, and the longest path."""
    known, micro_batches = judge.known, judge.micro_batches
    devices = [device.name for device in judge.cluster.devices]
    each_s = np.stack([known.seconds[d] + known.once_s[d] / micro_batches for d in devices])
    return max(micro_batches * least_busy_s(each_s), _longest_s(known, devices))


def _longest_s(known: Work, devices: list[str]) -> float:
    """Return the longest path, every unit on the device that runs it fastest, moves for free."""
    least_s = np.min([known.seconds[d] for d in devices], axis=0)
    ready_s = np.zeros(len(least_s))
    for maker, reader in sorted(known.edges, key=lambda edge: edge[1]):
        ready_s[reader] = max(ready_s[reader], ready_s[maker] + least_s[maker])
    return float((ready_s + least_s).max(initial=0.0))
