"""Zones of a cluster file -> nouns, and back: where hosts stand, and the hosts that zones link."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from bigbrain_fx.cluster.document import Document
from bigbrain_fx.cluster.file import ZoneEntry
from bigbrain_fx.cluster.quantity import quoted
from bigbrain_fx.core import Cluster, Device, Link, Zone


def read_zones(
    document: Document, entries: list[ZoneEntry], devices: tuple[Device, ...]
) -> tuple[Zone, ...]:
    """Return the zones, once each host is in one of them.

    Raises:
        InputError: names the entry and its fault.
    """
    known = list(dict.fromkeys(device.host for device in devices))
    first: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if entry.name in [other.name for other in entries[:i]]:
            raise document.error(
                ("zones", i, "name"),
                f"{quoted(entry.name)} is the name of another zone, too",
                "list the hosts of both in one of them",
                code="BX1054",
            )
        for k, host in enumerate(entry.hosts):
            document.require_known(("zones", i, "hosts", k), host, known, "host")
            if host in first:
                raise document.error(
                    ("zones", i, "hosts", k),
                    f"host {quoted(host)} is already in zones[{first[host]}]",
                    "a host stands in one zone: name it once",
                    code="BX1055",
                )
            first[host] = i
    lacking = [host for host in known if host not in first]
    if entries and lacking:
        raise document.error(
            ("zones",),
            f"no zone has the host {quoted(lacking[0])}",
            f'add it to "hosts" of a zone, or a zone: {{"name": "z", "hosts": '
            f"[{quoted(lacking[0])}]}}",
            code="BX1056",
        )
    return tuple(Zone(entry.name, tuple(entry.hosts)) for entry in entries)


def hosts_between(
    zones: tuple[Zone, ...], links: Mapping[frozenset[str], Link], others: Link | None
) -> dict[frozenset[str], Link]:
    """Return the links of pairs of hosts that follow from those of pairs of zones.

    Args:
        zones: all.
        links: by the two names; one name is for unlike hosts of the one zone.
        others: of different zones that have none of these.
    """
    found = {}
    for one, two in itertools.combinations(_places(zones), 2):
        fallback = others if one[0] != two[0] else None
        link = links.get(frozenset((one[0], two[0])), fallback)
        if link is not None:
            found[frozenset((one[1], two[1]))] = link
    return found


def _places(zones: tuple[Zone, ...]) -> Iterator[tuple[str, str]]:
    return ((zone.name, host) for zone in zones for host in zone.hosts)


def zones_json(cluster: Cluster) -> list[dict[str, object]]:
    """Write the zones as `zones` of a cluster file, with the hosts that are in the cluster."""
    there = {device.host for device in cluster.devices}
    hosts = {zone.name: [h for h in zone.hosts if h in there] for zone in cluster.zones}
    return [{"name": name, "hosts": own} for name, own in hosts.items() if own]
