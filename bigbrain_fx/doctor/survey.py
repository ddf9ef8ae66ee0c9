"""Devices that differ -> a cluster.json with each device's own rates and every pair's link.

This room is told which devices there are and how a process is started on one; `probe` makes up
equal devices of this host instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigbrain_fx.core import Cluster, Device, Link, Overheads
from bigbrain_fx.doctor.fleet import Fleet, run
from bigbrain_fx.doctor.probe import (
    Rates,
    link_between,
    link_text,
    overheads_of,
    rates_of,
    three_digits,
    write_cluster,
)
from bigbrain_fx.launch import Spawn, popen

_MIB = 2**20
_START_S = 60.0  # until the slowest process has imported torch and joined
_MEASUREMENTS = 40  # windows that one device's own figures take at most, in slow motion
_LINK_WINDOWS = 16  # and those of one link


@dataclass(frozen=True)
class DeviceProbe:
    """What one device was found to sustain while all of them computed."""

    name: str
    host: str
    threads: int
    memory_bytes: int
    rates: Rates
    overheads: Overheads = field(default_factory=Overheads)


@dataclass(frozen=True)
class Survey:
    """What was measured on a cluster; `cluster` is what planners get, `print` shows it.

    Attributes:
        devices: in the order they were given.
        links: (name, name, link) of every pair.
    """

    devices: tuple[DeviceProbe, ...]
    links: tuple[tuple[str, str, Link], ...]
    took_s: float

    @property
    def cluster(self) -> Cluster:
        """The cluster as found, figures to three digits; the default link is the slowest."""
        links = tuple(
            (a, b, Link(three_digits(link.latency_s), three_digits(link.bytes_per_s)))
            for a, b, link in self.links
        )
        slowest = min((link for *_, link in links), key=lambda link: link.bytes_per_s)
        return Cluster(tuple(map(_device, self.devices)), slowest, links)

    def write(self, path: str | Path, force: bool = False) -> None:
        """Write the cluster file: see `write_cluster`."""
        write_cluster(self.cluster, path, force)

    def __str__(self) -> str:
        lines = [
            f"{probe.name:<10}{probe.memory_bytes / 2**30:.1f} GiB, {probe.rates}, "
            f"{probe.threads} thread(s)"
            for probe in self.devices
        ]
        lines += [f"{f'{a}-{b}':<10}{link_text(link)}" for a, b, link in self.links]
        return "\n".join([*lines, f"measured in {self.took_s:.0f} s"])


def survey(devices: Sequence[Device], spawn: Spawn = popen, *, window_s: float = 1.0) -> Survey:
    """Measure devices while all of them compute, then the link of every pair, one after another.

    Args:
        devices: CPU devices, two at least; names, hosts and threads count, their rates do not.
        spawn: starts a process on the device that its command names.
        window_s: seconds that one measurement takes; of many periods, where a quota holds devices.

    Raises:
        ProbeError: a process failed or hung.
    """
    start, count = time.monotonic(), len(devices)
    pairs = list(itertools.combinations(range(count), 2))
    results = run(
        Fleet(
            names=tuple(device.name for device in devices),
            threads=tuple(device.threads for device in devices),
            busy=count,
            linked=count,
            window_s=window_s,
            deadline_s=_START_S + window_s * (_MEASUREMENTS + _LINK_WINDOWS * len(pairs)),
        ),
        spawn=spawn,
    )
    found = tuple(
        DeviceProbe(
            d.name,
            d.host,
            d.threads,
            int(result["memory_bytes"]),
            rates_of(result),
            overheads_of([result]),
        )
        for d, result in zip(devices, results, strict=True)
    )
    links = tuple((devices[a].name, devices[b].name, link_between(results, a, b)) for a, b in pairs)
    return Survey(found, links, time.monotonic() - start)


def _device(probe: DeviceProbe) -> Device:
    return Device(
        name=probe.name,
        host=probe.host,
        kind="cpu",
        memory_bytes=probe.memory_bytes // _MIB * _MIB,
        flops_per_s=three_digits(probe.rates.flops_per_s),
        memory_bytes_per_s=three_digits(probe.rates.memory_bytes_per_s),
        launch_s=three_digits(probe.rates.launch_s),
        threads=probe.threads,
        overheads=probe.overheads,
    )
