"""A graph on a cluster, ready to compare whole placements of any shape: time, memory, text.

A placement is cut into stages and scheduled, in arrays: 1F1B for one stage per device, the list
scheduler for anything else, micro-batch after micro-batch where nothing is trained. Messages do not
wait for others on a shared NIC; otherwise the figure is that of `bigbrain_fx.plan.simulate`, which
a test holds it to. It knows no method.

Source: Graham 1969 (list scheduling), Narayanan et al., SOSP'19 (1F1B).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import (
    InFlight,
    Play,
    StageCutter,
    TimedStages,
    Work,
    alternating,
    forwards,
    in_flight_to_fill,
    played_s,
    work,
)

from .memory_bound import MemoryBound

Homes = tuple[int, ...]  # per unit: the number of its device in the cluster


@dataclass(frozen=True)
class Evaluator:
    """What a step takes under a placement, and whether it fits.

    Attributes:
        graph: concrete.
        cluster: its devices.
        costs: of the graph's ops.
        micro_batches: per step.
        in_flight: as in `planning.in_flight_at`.
    """

    graph: Graph
    cluster: Cluster
    costs: Costs
    micro_batches: int
    in_flight: InFlight = None
    _steps_s: dict[Homes, float] = field(default_factory=dict, compare=False)

    @cached_property
    def known(self) -> Work:
        """The units, in the order of the graph."""
        return work(self.graph, self.costs)

    @cached_property
    def bound(self) -> MemoryBound:
        """The devices' memory."""
        return MemoryBound(self.known, self.cluster, self.micro_batches, self.in_flight)

    @cached_property
    def _cutter(self) -> StageCutter:
        return StageCutter(self.known, self.cluster)

    def names(self, homes: Sequence[int]) -> list[str]:
        """Return the devices' names."""
        return [self.cluster.devices[home].name for home in homes]

    def fits(self, homes: Sequence[int]) -> bool:
        """Whether every device can hold its units."""
        return self.bound.fits(self.names(homes))

    def step_s(self, homes: Sequence[int]) -> float:
        """Return the seconds of a step, as the simulator would find them."""
        key = tuple(homes)
        if key not in self._steps_s:
            self._steps_s[key] = self._played_s(self._cutter.stages(homes))
        return self._steps_s[key]

    def best(self, candidates: Iterable[Homes]) -> Homes | None:
        """Return the fastest that fits, the first of equals; None when none does."""
        fitting = [homes for homes in dict.fromkeys(candidates) if self.fits(homes)]
        return min(fitting, key=self.step_s, default=None)

    def homes(self, placement: Placement) -> Homes:
        """Return the device of every unit of a placement."""
        number = {device.name: i for i, device in enumerate(self.cluster.devices)}
        return tuple(number[placement.device_of[group[0]]] for group in self.known.groups)

    def placement(self, homes: Sequence[int], reason: str) -> Placement:
        """Return the placement of every op."""
        names = self.names(homes)
        first = names[0] if names else self.cluster.devices[0].name
        return Placement(self.known.placed(names, first), reason)

    def _played_s(self, stages: TimedStages) -> float:
        count, trains = self.micro_batches, self.known.trains
        if not stages.device_of:
            return 0.0
        if not trains:
            orders = forwards(stages, count)
        elif stages.is_chain:
            flights = self._numbers(range(len(stages.devices), 0, -1))
            orders = alternating(stages, count, flights)
        else:
            flights = self._numbers(in_flight_to_fill(stages, count))
            orders = Play(stages, count, dict(zip(stages.devices, flights, strict=True))).orders()
        return played_s(stages, orders, trains)

    def _numbers(self, otherwise: Sequence[int]) -> list[int]:
        """Return how many micro-batches each device has in flight: those asked for, or these."""
        if self.in_flight is None:
            return list(otherwise)
        asked = (self.in_flight,) if isinstance(self.in_flight, int) else self.in_flight
        return [asked[min(number, len(asked) - 1)] for number in range(len(otherwise))]
