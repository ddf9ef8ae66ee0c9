"""Which devices of a cluster are alike, told by rates, then by links, then by name.

So what is planned does not depend on the order in which a cluster lists its devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.planning.contention import bytes_per_s


def canonical(cluster: Cluster) -> Cluster:
    """Return the cluster with its devices in an order that its list has no part in.

    By what each does and holds, by its links and its neighbours' (as far as these differ), by name.
    """
    return replace(cluster, devices=seen_devices(cluster).devices)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort "d10" after "d9"."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def traits(device: Device) -> tuple[float | str, ...]:
    """Return what a device does and holds, in numbers that compare; the fastest come first."""
    own = device.overheads
    numbers = (
        device.half_flops_per_s,
        device.blas_bytes,
        own.message_s,
        own.message_bytes_per_s,
        own.instruction_s,
        own.step_s,
        device.tf32_flops_per_s,
        *(took_s for _, took_s in device.kernels),
    )
    return (
        -device.flops_per_s,
        -device.memory_bytes_per_s,
        -device.memory_bytes,
        device.kind,
        device.launch_s,
        float(device.threads),
        *(-1.0 if number is None else number for number in numbers),
    )


_Wire = tuple[float, float, bool]


def _wire(cluster: Cluster, a: Device, b: Device) -> _Wire:
    """Return what a message meets: latency, minus the rate, whether it leaves a shared host."""
    leaves = bool(cluster.hosts) and a.host != b.host
    latency_s = cluster.link(a.name, b.name).latency_s
    return latency_s, -bytes_per_s(cluster, a.name, b.name), leaves


@dataclass(frozen=True)
class SeenDevices:
    """Devices in an order that their list has no part in, and what tells them apart.

    Attributes:
        devices: in this order.
        wires: device -> device -> the number of what a message from one to the other meets.
        colours: equal where traits and, as far as these differ, links and neighbours are.
    """

    devices: tuple[Device, ...]
    wires: list[list[int]]
    colours: list[int]

    @staticmethod
    def of(cluster: Cluster) -> SeenDevices:
        """Look at a cluster; its pairs of devices are asked for once, they may be a million."""
        devices = sorted(cluster.devices, key=lambda device: natural(device.name))
        met = [[_wire(cluster, a, b) for b in devices] for a in devices]
        number = {wire: i for i, wire in enumerate(sorted({w for row in met for w in row}))}
        wires = [[number[wire] for wire in row] for row in met]
        colours = _colours(devices, wires)
        ranked = sorted(range(len(devices)), key=lambda i: (colours[i], i))
        return SeenDevices(
            tuple(devices[i] for i in ranked),
            [[wires[a][b] for b in ranked] for a in ranked],
            [colours[i] for i in ranked],
        )

    def kinds(self) -> list[int]:
        """Return the first device that each could change places with; itself, maybe."""
        found: list[int] = []
        firsts: dict[int, list[int]] = {}
        for i, colour in enumerate(self.colours):
            alike = firsts.setdefault(colour, [])
            found.append(next((j for j in alike if self._could_swap(j, i)), i))
            if found[i] == i:
                alike.append(i)
        return found

    def _could_swap(self, a: int, b: int) -> bool:
        """Whether two devices of one colour meet the same on the way to every third."""
        rows = [list(self.wires[i]) for i in (a, b)]
        for row in rows:
            row[a] = row[b] = 0
        return rows[0] == rows[1]


@lru_cache(maxsize=4)
def seen_devices(cluster: Cluster) -> SeenDevices:
    """Look at a cluster once, for every number of micro-batches."""
    return SeenDevices.of(cluster)


def _colours(devices: Sequence[Device], wires: Sequence[Sequence[int]]) -> list[int]:
    """Number devices such that equal numbers have equal traits and, seen so, equal links."""
    colours = _numbered([traits(device) for device in devices])
    while True:
        counts = [Counter(zip(row, colours, strict=True)) for row in wires]
        seen = [
            # many of the least pair come before few, as in a sorted list of all pairs
            (colour, *sorted((pair, -count) for pair, count in near.items()))
            for colour, near in zip(colours, counts, strict=True)
        ]
        finer = _numbered(seen)
        if len(set(finer)) == len(set(colours)):
            return finer
        colours = finer


def _numbered(keys: Sequence[tuple[Any, ...]]) -> list[int]:
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    return [number[key] for key in keys]
