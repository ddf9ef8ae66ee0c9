"""The links of a cluster file -> the pairs of devices whose link is not the default, and back.

    a link of two devices:  between.devices  >  between.hosts  >  between.zones  >  between_zones
                            >  same_host  >  presets  >  default

Presets say what links cards of one host: what is written of the network does not slow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from bigbrain_fx.cluster import quantity
from bigbrain_fx.cluster.document import Document, JsonPath
from bigbrain_fx.cluster.file import BetweenEntry, LinkEntry, LinksEntry
from bigbrain_fx.cluster.presets import PRESETS
from bigbrain_fx.cluster.quantity import quoted
from bigbrain_fx.cluster.zones import hosts_between
from bigbrain_fx.core import Cluster, Device, Link, Zone

# For a file that names no links: the slowest network a lab is likely to have, so that a forecast
# errs on the careful side; and what gloo surely does between two processes of one host (measured on
# a two-core machine: 55 us and 3.9 GB/s).
DEFAULT_LINK = Link(latency_s=1e-4, bytes_per_s=125e6)
DEFAULT_SAME_HOST_LINK = Link(latency_s=5e-5, bytes_per_s=1e9)

_Pair = frozenset[str]


def default_link(document: Document, links: LinksEntry) -> Link:
    """Return the link of any pair without an entry."""
    return _link(document, ("links", "default"), links.default) if links.default else DEFAULT_LINK


def read_links(
    document: Document, links: LinksEntry, devices: tuple[Device, ...], zones: tuple[Zone, ...]
) -> tuple[tuple[str, str, Link], ...]:
    """List the pairs whose link is not the default: pairs as written first, then by host.

    Raises:
        InputError: names the entry and its fault; or two zones that nothing links.
    """
    of_devices, of_hosts = _written(document, links, devices, zones)
    same_host = _same_host(document, links)
    others = []
    for one, two in _near_or_named(devices, of_hosts):
        wire = None if links.same_host else _wire(one, two)
        fallback = (wire or same_host) if one.host == two.host else None
        link = of_hosts.get(frozenset((one.host, two.host)), fallback)
        if link and frozenset((one.name, two.name)) not in of_devices:
            others.append((one.name, two.name, link))
    found = (*of_devices.values(), *others)
    _require_linked(document, devices, zones, found)
    return found


def _written(
    document: Document, links: LinksEntry, devices: tuple[Device, ...], zones: tuple[Zone, ...]
) -> tuple[dict[_Pair, tuple[str, str, Link]], dict[_Pair, Link]]:
    """Return the links of pairs of devices, and of pairs of hosts, as the file has them."""
    of_devices: dict[_Pair, tuple[str, str, Link]] = {}
    of_hosts: dict[_Pair, Link] = {}
    of_zones: dict[_Pair, Link] = {}
    first: dict[tuple[str, _Pair], int] = {}
    for i, entry in enumerate(links.between):
        path: JsonPath = ("links", "between", i)
        field, (a, b) = _ends(document, path, entry, devices, zones)
        pair, link = frozenset((a, b)), _link(document, path, entry)
        if (field, pair) in first:
            raise document.error(
                (*path, field),
                f"the pair {quoted(a)}, {quoted(b)} is already in "
                f"links.between[{first[field, pair]}]",
                "keep one of the two; a link holds both ways",
                code="BX1041",
            )
        first[field, pair] = i
        if field == "devices":
            of_devices[pair] = (a, b, link)
        else:
            (of_hosts if field == "hosts" else of_zones)[pair] = link
    far = links.between_zones
    others = None if far is None else _link(document, ("links", "between_zones"), far)
    return of_devices, {**hosts_between(zones, of_zones, others), **of_hosts}


def _require_linked(
    document: Document,
    devices: tuple[Device, ...],
    zones: tuple[Zone, ...],
    found: Collection[tuple[str, str, Link]],
) -> None:
    """Refuse two zones of which some devices would have the default link."""
    zone_of = {host: zone.name for zone in zones for host in zone.hosts}
    linked = {frozenset((a, b)) for a, b, _ in found} if zones else set()
    for one, two in itertools.combinations(devices if zones else (), 2):
        a, b = zone_of[one.host], zone_of[two.host]
        if a != b and frozenset((one.name, two.name)) not in linked:
            raise document.error(
                ("links",),
                f"nothing links the zones {quoted(a)} and {quoted(b)}",
                'add to links "between": [{"zones": '
                f'[{quoted(a)}, {quoted(b)}], "bandwidth": "1Gbit/s", "latency": "30ms"}}], or '
                '"between_zones": {"bandwidth": "1Gbit/s", "latency": "30ms"} for all zones',
                code="BX1051",
            )


def _near_or_named(
    devices: tuple[Device, ...], named: Collection[_Pair]
) -> list[tuple[Device, Device]]:
    """Return the pairs of one host, and of hosts that are named together, in the file's order.

    All others have the default link: of thousands of devices there are millions.
    """
    on: dict[str, list[int]] = {}
    for place, device in enumerate(devices):
        on.setdefault(device.host, []).append(place)
    places = [pair for own in on.values() for pair in itertools.combinations(own, 2)]
    for hosts in named:
        if len(hosts) == 2:
            a, b = hosts
            places += [(min(i, j), max(i, j)) for i in on[a] for j in on[b]]
    return [(devices[i], devices[j]) for i, j in sorted(places)]


def _same_host(document: Document, links: LinksEntry) -> Link | None:
    if links.same_host:
        return _link(document, ("links", "same_host"), links.same_host)
    return None if links.default else DEFAULT_SAME_HOST_LINK


def _wire(one: Device, two: Device) -> Link | None:
    """Return what two cards of one host talk over by their datasheets: the slower one's."""
    if not (one.preset and two.preset):
        return None
    wires = (PRESETS[one.preset].wire, PRESETS[two.preset].wire)
    slower = min(wires, key=lambda wire: wire.bytes_per_s)
    return Link(slower.latency_s, slower.bytes_per_s)


def _ends(
    document: Document,
    path: JsonPath,
    entry: BetweenEntry,
    devices: tuple[Device, ...],
    zones: tuple[Zone, ...],
) -> tuple[str, list[str]]:
    """Return "devices", "hosts" or "zones" and the two names, once it is clear that they exist."""
    given = {"devices": entry.devices, "hosts": entry.hosts, "zones": entry.zones}
    named = {field: names for field, names in given.items() if names is not None}
    if len(named) != 1:
        raise document.error(
            path,
            'expected one of "devices", "hosts" and "zones", found '
            f"{' and '.join(named) or 'none'}",
            '"devices": ["d0", "d1"] for one pair, "hosts": ["a", "b"] for all pairs of two hosts, '
            '"zones": ["eu", "us"] for those of two zones',
            code="BX1042",
        )
    field, names = named.popitem()
    every = {
        "devices": [device.name for device in devices],
        "hosts": list(dict.fromkeys(device.host for device in devices)),
        "zones": [zone.name for zone in zones],
    }
    for k, name in enumerate(names):
        document.require_known((*path, field, k), name, every[field], field[:-1])
    if field == "devices" and names[0] == names[1]:
        raise document.error(
            (*path, field),
            f"device {quoted(names[0])} is linked to itself",
            "name two devices; moving data inside one device costs nothing here",
            code="BX1043",
        )
    return field, names


def _link(document: Document, path: JsonPath, entry: LinkEntry) -> Link:
    sizes = entry.bandwidth_by_size or {}
    table = tuple(sorted((quantity.memory_bytes(size), rate) for size, rate in sizes.items()))
    link = Link(entry.latency, entry.bandwidth, table, entry.price_per_gb_usd or 0.0)
    if any(rate > entry.bandwidth for _, rate in table):
        raise document.error(
            (*path, "bandwidth_by_size"),
            "a smaller message has a higher rate than bandwidth, which is that of the largest",
            f'write the highest rate as bandwidth: "{_rate(max(rate for _, rate in table))}"',
            code="BX1052",
        )
    taken = [link.wire_s(size) for size, _ in table]
    if any(later < sooner for sooner, later in itertools.pairwise(taken)):
        raise document.error(
            (*path, "bandwidth_by_size"),
            "by this table a larger message takes less time than a smaller one",
            "measure both again, or delete the smaller one's rate",
            code="BX1053",
        )
    return link


def links_json(cluster: Cluster) -> dict[str, object]:
    """Write the links as `links` of a cluster file."""
    return {
        "default": _link_json(cluster.default_link),
        **_same_host_json(cluster),
        "between": [{"devices": [a, b], **_link_json(link)} for a, b, link in cluster.links],
    }


def _same_host_json(cluster: Cluster) -> dict[str, object]:
    """Say that the default holds between cards of one host, where presets would say otherwise."""
    listed = {frozenset((a, b)) for a, b, _ in cluster.links}
    near = _near_or_named(cluster.devices, ())
    if any(_wire(a, b) and frozenset((a.name, b.name)) not in listed for a, b in near):
        return {"same_host": _link_json(cluster.default_link)}
    return {}


def _link_json(link: Link) -> dict[str, object]:
    sizes = {quantity.memory_text(size): _rate(rate) for size, rate in link.by_size}
    return {
        "bandwidth": _rate(link.bytes_per_s),
        "latency": quantity.time_text(link.latency_s),
        **({"bandwidth_by_size": sizes} if sizes else {}),
        **({"price_per_gb_usd": link.usd_per_gb} if link.usd_per_gb else {}),
    }


def _rate(bytes_per_s: float) -> str:
    return quantity.rate_text(bytes_per_s, "B/s")
