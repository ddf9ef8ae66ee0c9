"""Messages in simulated time: link and NICs of each, and its arrival.

A link is one way between two devices and carries one message at a time, in the order of sending.
Latency does not occupy it. Hosts may have a NIC that all messages out of the host share, and all
into it. Each message takes its own part of the NIC's time, in the order of sending. Link and NICs
work on a message at once, and each begins when it is free itself. A message that waits for one of
them holds up no message of the others.

Sums by collectives of torch.distributed, and those of many replicas, are messages that all replicas
send at once: see `collectives`.

The module knows no programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, log2
from typing import TypeAlias

from bigbrain_fx.core import Bucket, Cluster, Edge, EdgeKind, Link, Overheads, Stages
from bigbrain_fx.plan.schedule import StageCosts

# ------------------------------------------------------------------------------------------------
# Exchanges of many replicas in simulated time: each sends every other one a piece of its own.
#
#   reduce   every replica ──its part of piece r──▶ replica r     for all r at once
#   gather   replica r ──its piece──▶ every other one
#
# An exchange begins when all have joined it, as a collective does. What comes to a replica, or
# leaves it, goes over as many links at once; the NIC of a host carries all that goes to other
# hosts. This file knows devices and bytes; it knows no programs.


@dataclass(frozen=True)
class Pairs:
    """Devices that each send every other one a message."""

    cluster: Cluster
    devices: tuple[str, ...]

    def taken_s(self, kind: EdgeKind, pieces: Sequence[int]) -> dict[tuple[str, ...] | str, float]:
        """Return how long everything is taken by an exchange of pieces of so many bytes."""
        links: dict[tuple[str, ...] | str, float] = {
            (kind, name): max(link.wire_s(piece) for link in self._links[name])
            for name, piece in zip(self.devices, pieces, strict=True)
            if piece
        }
        return {**links, **dict(self._nics_s(kind, pieces))}

    @cached_property
    def latency_s(self) -> float:
        """Return the latency, during which no link is taken."""
        return max(link.latency_s for links in self._links.values() for link in links)

    def _nics_s(self, kind: EdgeKind, pieces: Sequence[int]) -> Iterator[tuple[str, float]]:
        """Yield how long NICs are taken: by pieces of a host's own, and by those of others."""
        on, total = dict.fromkeys(self._hosts, 0), sum(pieces)
        for name, piece in zip(self.devices, pieces, strict=True):
            on[self.cluster.device[name].host] += piece
        for host, count in self._hosts.items():
            own, others = on[host] * (len(self.devices) - count), (total - on[host]) * count
            enters, leaves = (own, others) if kind == "reduce" else (others, own)
            for way, nbytes in ((f"into {host}", enters), (f"out of {host}", leaves)):
                if way in self._nics:
                    yield way, nbytes / self._nics[way]

    @cached_property
    def _hosts(self) -> Counter[str]:
        return Counter(self.cluster.device[name].host for name in self.devices)

    @cached_property
    def _nics(self) -> Mapping[str, float]:
        """The rates of hosts' NICs, by name."""
        first = [*{self.cluster.device[name].host: name for name in self.devices}.values()]
        ways = pairwise([*first, first[0]])
        return dict(nic for a, b in ways for nic in self.cluster.nics(a, b))

    @cached_property
    def _links(self) -> Mapping[str, frozenset[Link]]:
        """The links between each device and the others, equal ones once."""
        links = {id(link): link for *_, link in self.cluster.links}
        links[id(self.cluster.default_link)] = self.cluster.default_link
        found = {}
        for name in self.devices:
            ids = {id(self.cluster.link(other, name)) for other in self.devices if other != name}
            found[name] = frozenset(links[each] for each in ids)
        return found


def handling_s(overheads: Overheads, pieces: Sequence[int], place: int, *, is_own: bool) -> float:
    """Return what a process takes for its messages: of its own piece with all, or of all others."""
    if is_own:
        count = len(pieces) - 1 if pieces[place] else 0
        nbytes = (len(pieces) - 1) * pieces[place]
    else:
        count = sum(map(bool, pieces)) - bool(pieces[place])
        nbytes = sum(pieces) - pieces[place]
    return count * overheads.message_s + overheads.handling_s(nbytes) - overheads.message_s


# ------------------------------------------------------------------------------------------------
# Exchanges in simulated time: a sum or a gather of replicas begins when all have joined it.
#
#   r0 --join----.                          its seconds are those of rings over all devices: inside
#   r1 ---join---|=====collective=====|     of hosts as fast as their links, between hosts as fast
#   r2 ------join'                          as their NICs, or as all links of a host's devices
#
# Each byte of a collective enters a host once. Collectives of the same devices go one after
# another; those of others share NICs with them. What many replicas send each other is in `pairs`.


Message: TypeAlias = tuple[Edge, int | None]
Way: TypeAlias = tuple[str, ...] | str
"""What a message takes for a while: a link or those of a ring, by devices; a NIC, by name."""
Key: TypeAlias = tuple[str, str, int, int]
KINDS: tuple[EdgeKind, ...] = ("reduce", "gather")
"""Of edges that are a part of an exchange."""


@dataclass(frozen=True)
class Ring:
    """Devices that sum or gather together."""

    cluster: Cluster
    devices: tuple[str, ...]

    @cached_property
    def hosts(self) -> Counter[str]:
        """How many of the devices each host has."""
        return Counter(self.cluster.device[name].host for name in self.devices)

    def taken_s(self, nbytes: int) -> dict[Way, float]:
        """Return how long everything is taken: each device sends the next one so many bytes."""
        return {self.devices: self.wire_s(nbytes), **self.nics_s(nbytes)}

    def wire_s(self, nbytes: int) -> float:
        """Return how long links are taken."""
        between_s = self._entering(nbytes) / self._between[0] if len(self.hosts) > 1 else 0.0
        return max(between_s, nbytes / self._inside[0])

    def nics_s(self, nbytes: int) -> dict[Way, float]:
        """Return how long the NICs of hosts are taken, by name."""
        rates = dict(nic for a, b in self._neighbours for nic in self.cluster.nics(a, b))
        return {name: self._entering(nbytes) / rate for name, rate in rates.items()}

    @cached_property
    def latency_s(self) -> float:
        """Return the latency: as many messages one after another as a tree is deep."""
        most = max(self.hosts.values())
        inside_s = self._inside[1] * ceil(log2(most)) if most > 1 else 0.0
        return inside_s + self._between[1] * ceil(log2(len(self.hosts)))

    def _entering(self, nbytes: int) -> float:
        """Return the bytes that enter each host, of so many that enter each device."""
        count, hosts = len(self.devices), len(self.hosts)
        return nbytes * count / (count - 1) * (hosts - 1) / hosts

    @cached_property
    def _neighbours(self) -> Sequence[tuple[str, str]]:
        """The ways of a ring that enters each host once."""
        host_of = {name: self.cluster.device[name].host for name in self.devices}
        order = sorted(self.devices, key=lambda name: list(self.hosts).index(host_of[name]))
        return [*pairwise(order), (order[-1], order[0])]

    @cached_property
    def _inside(self) -> tuple[float, float]:
        """The rate of the slowest way inside of a host, and its latency."""
        return self._slowest(is_inside=True)

    @cached_property
    def _between(self) -> tuple[float, float]:
        """The rate of a host's ways to others, all of its devices together, and its latency."""
        rate, latency_s = self._slowest(is_inside=False)
        return rate * min(self.hosts.values()), latency_s

    def _slowest(self, *, is_inside: bool) -> tuple[float, float]:
        device = self.cluster.device
        ways = ((a, b) for a, b in self._neighbours)
        found = [
            self.cluster.link(a, b)
            for a, b in ways
            if (device[a].host == device[b].host) == is_inside
        ]
        rate = min((link.bytes_per_s for link in found), default=float("inf"))
        return rate, max((link.latency_s for link in found), default=0.0)


class Exchanges:
    """Participants of each exchange so far: mutable, of one execution."""

    def __init__(self, stages: Stages, cluster: Cluster) -> None:
        self.stages, self.cluster = stages, cluster
        self._joined: dict[Key, list[tuple[Message, float]]] = {}
        self._known: dict[tuple[str, ...], Ring | Pairs] = {}
        self._of = {
            (b.name, number): self._between(b, number)
            for b in stages.buckets
            for number in range(stages.replicas // stages.shards)
        }

    def join(self, edge: Edge, micro: int | None, now_s: float) -> list[tuple[Message, float]]:
        """Join at `now_s`; return who joined when, once all have, and else nothing."""
        joined = self._joined.setdefault(self._key(edge, micro), [])
        joined.append(((edge, micro), now_s))
        all_are = len(joined) == self.stages.shards
        return joined if all_are else []

    def taken_s(self, edge: Edge) -> dict[Way, float]:
        """Return how long everything is taken by the exchange that an edge is of."""
        found = self._of[edge.value, self._group(edge)]
        if isinstance(found, Ring):
            return found.taken_s(edge.nbytes)
        return found.taken_s(edge.kind, self.stages.piece_bytes[edge.value, edge.kind])

    def latency_s(self, edge: Edge) -> float:
        """Return what passes beside."""
        return self._of[edge.value, self._group(edge)].latency_s

    def handling_s(self, overheads: Overheads, edge: Edge, *, receives: bool) -> float:
        """Return what a process takes to send, or to receive, its messages of an exchange."""
        if self.stages.by_backend:
            return overheads.handling_s(edge.nbytes)
        place = self.stages.stages[edge.target if receives else edge.source].replica
        is_own = receives == (edge.kind == "reduce")
        pieces = self.stages.piece_bytes[edge.value, edge.kind]
        return handling_s(overheads, pieces, place, is_own=is_own)

    def _group(self, edge: Edge) -> int:
        """Return the number of the shard group that an exchange is of; 0: of all replicas."""
        return self.stages.stages[edge.source].replica // self.stages.shards

    def _between(self, bucket: Bucket, number: int) -> Ring | Pairs:
        first = number * self.stages.shards
        own = bucket.stages[first : first + self.stages.shards]
        devices = tuple(self.stages.stages[stage].device for stage in own)
        kind = Ring if self.stages.by_backend else Pairs
        return self._known.setdefault(devices, kind(self.cluster, devices))

    def _key(self, edge: Edge, micro: int | None) -> Key:
        """Name an exchange: replicas have unlike numbers of micro-batches, in the same places."""
        if micro is not None and edge.kind != "gather":
            micro = self.stages.micros_of(edge.source, 0).index(micro)
        return edge.value, edge.kind, self._group(edge), micro or 0


# ------------------------------------------------------------------------------------------------
# Messages in simulated time: which link and which NICs each takes, and when it is there.


@dataclass(frozen=True, slots=True)
class Flight:
    """One message: it is on its way from start_s to free_s, and it is there at arrival_s."""

    edge: Edge
    micro: int | None
    start_s: float
    free_s: float
    arrival_s: float


class Messages:
    """Messages sent so far: mutable, of one execution."""

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
