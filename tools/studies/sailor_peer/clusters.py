"""Sailor's experiments -> clusters as ours and theirs are described.

    8xa100-40+24xv100-16     hosts of 4, all in one zone
    geo:8xa100-40            as many in each of five zones

Their runtime's devices wait for what they send to another stage. Rates between hosts are theirs, by
size of message: of a zone those of two cards, and of all cards of two hosts at once for the NIC; of
two zones a card's part of what four reach at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster
from tools.studies.sailor_peer.peer import Kind, Peer
from tools.studies.sailor_peer.sailor_profile import CARDS

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-west1-b")
HOST = 4
SIZES = (131_072, 1 << 20, 8 << 20, 64 << 20)
LARGE = 500_000_000
THEIRS = {ours: theirs for theirs, ours in CARDS.items()}
LATENCY = "20us"
Entry = dict[str, object]


@dataclass(frozen=True)
class Place:
    """Cards of one kind in one zone, by the name of our preset."""

    card: str
    zone: str
    count: int
    host_cards: int

    @property
    def kind(self) -> Kind:
        """Their name of the card, and the zone."""
        return THEIRS[self.card], self.zone

    def host(self, number: int) -> str:
        """Return where a card is."""
        return f"{self.zone}.{self.card}.{number // self.host_cards}"


def places(on: str, host_cards: int = HOST) -> list[Place]:
    """Read an experiment's name, on hosts of so many cards."""
    zones = ZONES if on.startswith("geo:") else ZONES[:1]
    parts = [part.split("x", 1) for part in on.removeprefix("geo:").split("+")]
    return [Place(card, zone, int(count), host_cards) for zone in zones for count, card in parts]


def cluster(on: str, peer: Peer, host_cards: int = HOST) -> Cluster:
    """Return the cluster; products of float32 in TF32, as they trained."""
    every = places(on, host_cards)
    doc: Entry = {
        "devices": [device for place in every for device in _devices(place)],
        "hosts": [host for place in every for host in _hosts(place, peer)],
        "links": {
            "default": _link(peer, every[0].kind, every[0].kind),
            "between": [*_between(every, peer)],
        },
    }
    if len(hosts := _zones(every)) > 1:
        doc["zones"] = [{"name": zone, "hosts": own} for zone, own in hosts.items()]
    return parse_cluster(json.dumps(doc), on)


def zone_of(cluster: Cluster, device: str) -> str:
    """Return where a device stands."""
    return cluster.device[device].host.partition(".")[0]


def _devices(place: Place) -> Iterator[Entry]:
    for number in range(place.count):
        yield {
            "name": f"{place.zone}.{place.card}.g{number}",
            "kind": "cuda",
            "preset": place.card,
            "host": place.host(number),
            "matmul_precision": "high",
            "process_memory": "2GB",
            "overheads": {"blocking": True},
        }


def _hosts(place: Place, peer: Peer) -> Iterator[Entry]:
    rate = peer.rate(place.kind, place.kind, LARGE, place.host_cards)
    for number in range(0, place.count, place.host_cards):
        yield {"name": place.host(number), "nic": f"{rate:.4f}GB/s"}


def _zones(every: list[Place]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for place in every:
        own = found.setdefault(place.zone, [])
        own += dict.fromkeys(place.host(number) for number in range(place.count))
    return found


def _between(every: list[Place], peer: Peer) -> Iterator[Entry]:
    """Yield links of unlike cards of one zone, by hosts, and those of zones."""
    for one, two in combinations_with_replacement(every, 2):
        link = _link(peer, one.kind, two.kind)
        if one.zone != two.zone or (len(every) == len(ZONES)):
            yield {"zones": [one.zone, two.zone], **link}
        elif one is not every[0] or two is not every[0]:
            pairs = ((a, b) for a in _names(one) for b in _names(two) if a < b or one is not two)
            yield from ({"hosts": [a, b], **link} for a, b in pairs)


def _names(place: Place) -> list[str]:
    return [*dict.fromkeys(place.host(number) for number in range(place.count))]


def _link(peer: Peer, one: Kind, two: Kind) -> Entry:
    """Return their curve; where it calls a larger message faster, about the larger's time."""
    count = 1 if one[1] == two[1] else HOST
    sizes, most_s = {}, float("inf")
    for nbytes in reversed((*SIZES, LARGE)):
        most_s = min(0.99 * most_s, nbytes / 1e9 / peer.rate(one, two, nbytes, count) * count)
        sizes[nbytes] = nbytes / 1e9 / most_s
    curve = {f"{nbytes // 1024}KiB": f"{rate:.4f}GB/s" for nbytes, rate in sizes.items()}
    most = f"{max(sizes.values()):.4f}GB/s"
    return {"bandwidth": most, "latency": LATENCY, "bandwidth_by_size": curve}
