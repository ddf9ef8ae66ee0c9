"""Messages in simulated time: which link and which NICs each takes, and when it is there.

A link is one way between two devices, carries one message at a time, in the order they were sent,
and latency does not occupy it. Hosts may have a NIC that all messages out of the host share, and
all into it: each takes its own part of the NIC's time, in the order they were sent. Link and NICs
work on a message at once, and each begins with it when it is free itself: a message that has to
wait for one of them holds up none of those that the others have to carry.

Collectives of torch.distributed add inside of a host first, and a host takes a sum in once for all
its devices: of what they would send and take in one by one, a NIC carries a part.

It knows no programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Edge, Overheads, Stages
from bigbrain_fx.plan.schedule import StageCosts

Message: TypeAlias = tuple[Edge, int | None]


@dataclass(frozen=True, slots=True)
class Flight:
    """One message: it is on its way from start_s to free_s, and it is there at arrival_s."""

    edge: Edge
    micro: int | None
    start_s: float
    free_s: float
    arrival_s: float


class Messages:
    """What was sent so far: mutable, of one execution."""

    def __init__(self, stages: Stages, costs: StageCosts) -> None:
        self.stages, self.costs = stages, costs
        self.flights: dict[Message, Flight] = {}
        self._free_s: dict[tuple[str, str] | str, float] = {}
        self._left_s: dict[tuple[str, str], float] = {}
        self._beside = dict(_beside(stages, costs)) if stages.by_backend else {}

    def overheads(self, device: str) -> Overheads:
        """Return what a device's process does beside computing."""
        return self.costs.cluster.device[device].overheads

    def send(self, device: str, edge: Edge, micro: int | None, now_s: float) -> None:
        """Send a message at `now_s`: it has left when its link and its NICs are all done with it.

        A bucket has left before the end of the backward that completed it.
        """
        now_s -= self.costs.early_s.get(edge, 0.0)
        target = self.stages.stages[edge.target].device
        wire_s, latency_s = self.costs.wire_s(self.stages, edge)
        taken: dict[tuple[str, str] | str, float] = {(device, target): wire_s}
        for nic, bytes_per_s in self.costs.cluster.nics(device, target):
            taken[nic] = edge.nbytes / bytes_per_s / self._beside.get(edge, 1)
        start_s = max(now_s, self._left_s.get((device, target), 0.0))
        for way, occupied_s in taken.items():
            self._free_s[way] = max(now_s, self._free_s.get(way, 0.0)) + occupied_s
        free_s = self._left_s[device, target] = max(self._free_s[way] for way in taken)
        self.flights[edge, micro] = Flight(edge, micro, start_s, free_s, free_s + latency_s)


def _beside(stages: Stages, costs: StageCosts) -> Iterator[tuple[Edge, int]]:
    """Yield how many devices of a host take part in a collective, by what it sends instead."""
    host_of = {stage.index: costs.cluster.device[stage.device].host for stage in stages.stages}
    each = {b.name: Counter(host_of[number] for number in b.stages) for b in stages.buckets}
    for edge in stages.edges:
        if edge.kind in ("reduce", "gather") and edge.value in each:
            hosts = each[edge.value]
            yield edge, min(hosts[host_of[edge.source]], hosts[host_of[edge.target]])
