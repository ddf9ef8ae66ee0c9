"""Messages in simulated time: which link and which NICs each takes, and when it is there.

A link is one way between two devices, carries one message at a time, in the order they were sent,
and latency does not occupy it. Hosts may have a NIC that all messages out of the host share, and
all into it: each takes its own part of the NIC's time, in the order they were sent. Link and NICs
work on a message at once, and each begins with it when it is free itself: a message that has to
wait for one of them holds up none of those that the others have to carry.

Sums by collectives of torch.distributed, and those of many replicas, are messages that all replicas
send at once: see `collectives`.

It knows no programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Edge, Overheads, Stages
from bigbrain_fx.plan.schedule import StageCosts
from bigbrain_fx.plan.simulate.collectives import KINDS, Exchanges, Message, Way


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
        self._free_s: dict[Way, float] = {}
        self._left_s: dict[tuple[str, str], float] = {}
        self._exchanges = Exchanges(stages, costs.cluster) if stages.has_exchanges else None

    def overheads(self, device: str) -> Overheads:
        """Return what a device's process does beside computing."""
        return self.costs.cluster.device[device].overheads

    def handling_s(self, device: str, edge: Edge, *, receives: bool = False) -> float:
        """Return what a device's process takes to send a message, or to receive it."""
        if self._exchanges and edge.kind in KINDS:
            return self._exchanges.handling_s(self.overheads(device), edge, receives=receives)
        return self.overheads(device).handling_s(edge.nbytes)

    def send(self, device: str, edge: Edge, micro: int | None, now_s: float) -> Sequence[Message]:
        """Send a message at `now_s`: it has left when its link and its NICs are all done with it.

        A bucket has left before the end of the backward that completed it.

        Returns:
            What is on its way now: an exchange's messages when the last of them is sent.
        """
        now_s -= self.costs.early_s.get(edge, 0.0)
        if self._exchanges and edge.kind in KINDS:
            return self._joined(self._exchanges, edge, micro, now_s)
        target = self.stages.stages[edge.target].device
        wire_s, latency_s = self.costs.wire_s(self.stages, edge)
        taken: dict[Way, float] = {(device, target): wire_s}
        for nic, bytes_per_s in self.costs.cluster.nics(device, target):
            taken[nic] = edge.nbytes / bytes_per_s
        start_s = max(now_s, self._left_s.get((device, target), 0.0))
        free_s = self._left_s[device, target] = self._taken(taken, now_s)
        self.flights[edge, micro] = Flight(edge, micro, start_s, free_s, free_s + latency_s)
        return ((edge, micro),)

    def sent_s(self, device: str, message: Message, now_s: float) -> float:
        """Return when a device that has sent a message goes on: at once, or when it is there."""
        blocks = self.overheads(device).blocking and message[0].kind not in KINDS
        return max(now_s, self.flights[message].arrival_s) if blocks else now_s

    def _joined(
        self, exchanges: Exchanges, edge: Edge, micro: int | None, now_s: float
    ) -> Sequence[Message]:
        """Join an exchange; it begins with the last of its devices."""
        joined = exchanges.join(edge, micro, now_s)
        if not joined:
            return ()
        begun_s = max(each_s for _, each_s in joined)
        free_s = self._taken(exchanges.taken_s(edge), begun_s)
        arrival_s = free_s + exchanges.latency_s(edge)
        for (each, number), _ in joined:
            flight = Flight(each, number, begun_s, free_s, arrival_s)
            self.flights[each, number] = flight
        return [message for message, _ in joined]

    def _taken(self, taken: Mapping[Way, float], now_s: float) -> float:
        """Take links and NICs for so long, each when it is free; return when all are done."""
        for way, occupied_s in taken.items():
            self._free_s[way] = max(now_s, self._free_s.get(way, 0.0)) + occupied_s
        return max(self._free_s[way] for way in taken)
