"""Exchanges of many replicas in simulated time: each sends every other one a piece of its own.

    reduce   every replica ──its part of piece r──▶ replica r     for all r at once
    gather   replica r ──its piece──▶ every other one

An exchange begins when all have joined it, as a collective does. What comes to a replica, or leaves
it, goes over as many links at once; the NIC of a host carries all that goes to other hosts. This
file knows devices and bytes; it knows no programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from bigbrain_fx.core import Cluster, EdgeKind, Link, Overheads


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
        """What passes beside."""
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
