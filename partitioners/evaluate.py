"""A graph on a cluster, ready to compare whole placements of any shape: time, memory, text.

Methods that search by a cheaper measure let this one decide in the end, so that their answer is
never worse than their start. It knows no method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning import InFlight, StageCutter, Work, work
from partitioners.rehearsal import step_s
from partitioners.room import Room

Homes = tuple[int, ...]  # per unit: the number of its device in the cluster


@dataclass(frozen=True)
class Judge:
    """What a step takes under a placement, and whether it fits.

    Attributes:
        graph: concrete.
        cluster: its devices.
        costs: of the graph's ops.
        micro_batches: per step.
        in_flight: as in `footprint.in_flight_at`.

    Raises:
        InputError: no micro-batches.
    """

    graph: Graph
    cluster: Cluster
    costs: Costs
    micro_batches: int
    in_flight: InFlight = None
    _steps_s: dict[tuple[Homes, int], float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        require_micro_batches(self.micro_batches)

    @cached_property
    def known(self) -> Work:
        """The units, in the order of the graph."""
        return work(self.graph, self.costs)

    @cached_property
    def room(self) -> Room:
        """The devices' memory."""
        return Room(self.known, self.cluster, self.micro_batches, self.in_flight)

    @cached_property
    def _cutter(self) -> StageCutter:
        return StageCutter(self.known, self.cluster)

    def names(self, homes: Sequence[int]) -> list[str]:
        """Return the devices' names."""
        return [self.cluster.devices[home].name for home in homes]

    def fits(self, homes: Sequence[int]) -> bool:
        """Whether every device can hold its units."""
        return self.room.fits(self.names(homes))

    def step_s(self, homes: Sequence[int], micro_batches: int | None = None) -> float:
        """Return the seconds of a step, as the simulator would find them.

        Args:
            homes: the device of every unit.
            micro_batches: in place of those of a step; 1 gives what one takes alone.
        """
        count = micro_batches or self.micro_batches
        key = tuple(homes), count
        if key not in self._steps_s:
            stages = self._cutter.stages(homes)
            self._steps_s[key] = step_s(stages, count, self.in_flight, self.known.trains)
        return self._steps_s[key]

    def best(self, candidates: Iterable[Homes], micro_batches: int | None = None) -> Homes | None:
        """Return the fastest that fits, the first of equals; None when none does."""
        fitting = [homes for homes in dict.fromkeys(candidates) if self.fits(homes)]
        return min(fitting, key=lambda h: self.step_s(h, micro_batches), default=None)

    def homes(self, placement: Placement) -> Homes:
        """Return the device of every unit of a placement."""
        number = {device.name: i for i, device in enumerate(self.cluster.devices)}
        return tuple(number[placement.device_of[group[0]]] for group in self.known.groups)

    def placement(self, homes: Sequence[int], reason: str) -> Placement:
        """Return the placement of every op."""
        names = self.names(homes)
        first = names[0] if names else self.cluster.devices[0].name
        return Placement(self.known.placed(names, first), reason)

    def used(self, homes: Sequence[int]) -> str:
        """Return the devices in use as text, in the order of their first unit."""
        return ", ".join(dict.fromkeys(self.names(homes)))


def require_micro_batches(micro_batches: int) -> None:
    """Raise unless there is one at least."""
    if micro_batches < 1:
        raise InputError(f"a step needs at least 1 micro-batch, not {micro_batches}", code="BX1404")
