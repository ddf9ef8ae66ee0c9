"""Exchanges in simulated time: a sum or a gather of replicas begins when all have joined it.

    r0 --join----.                          its seconds are those of rings over all devices: inside
    r1 ---join---|=====collective=====|     of hosts as fast as their links, between hosts as fast
    r2 ------join'                          as their NICs, or as all links of a host's devices

Each byte of a collective enters a host once. Collectives of the same devices go one after another;
those of others share NICs with them. What many replicas send each other is in `pairs`. It knows no
programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, log2
from typing import TypeAlias

from bigbrain_fx.core import Bucket, Cluster, Edge, EdgeKind, Overheads, Stages
from bigbrain_fx.plan.simulate.pairs import Pairs, handling_s

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
        """What passes beside: as many messages one after another as a tree is deep."""
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
    """Who has joined which exchange: mutable, of one execution."""

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
