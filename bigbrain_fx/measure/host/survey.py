"""Devices that differ -> a cluster.json with each device's own rates and every pair's link.

The caller names the devices and starts a process on each; `probe` makes up equal devices of this
host instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.bundles import Spawn, popen
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.measure.host.clusters import DeviceProbe, Findings, linked
from bigbrain_fx.measure.host.figures import link_between, link_text, overheads_of, rates_of
from bigbrain_fx.measure.host.fleet import Fleet, patience_s, run


@dataclass(frozen=True)
class Survey(Findings):
    """Measurements of a cluster; planners get `cluster`, and `print` shows it.

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
        return linked([probe.device for probe in self.devices], self.links)

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

    Links are measured over what a bundle of these devices uses: nccl where all of them are GPUs,
    else gloo.

    Args:
        devices: two at least; names, hosts, kinds and threads count, their rates do not. A GPU is
            the one with the device's number among the devices of its host, as in a bundle.
        spawn: starts a process on the device that its command names.
        window_s: seconds that one measurement takes; of many periods, where a quota holds devices.

    Raises:
        ProbeError: a process failed or hung.
    """
    start, count = time.monotonic(), len(devices)
    pairs = list(itertools.combinations(range(count), 2))
    kinds = tuple(device.kind for device in devices)
    results = run(
        Fleet(
            names=tuple(device.name for device in devices),
            kinds=kinds,
            threads=tuple(device.threads for device in devices),
            busy=count,
            linked=count,
            window_s=window_s,
            deadline_s=patience_s(kinds, window_s),
            hosts=tuple(device.host for device in devices),
        ),
        spawn=spawn,
    )
    found = tuple(
        DeviceProbe(
            d.name,
            d.host,
            d.threads,
            int(result["memory_bytes"]),
            rates_of([result]),
            overheads_of([result]),
            d.kind,
            result.get("blas_bytes"),
        )
        for d, result in zip(devices, results, strict=True)
    )
    links = tuple((devices[a].name, devices[b].name, link_between(results, a, b)) for a, b in pairs)
    return Survey(found, links, time.monotonic() - start)
