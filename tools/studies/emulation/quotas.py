"""How fast and how large each emulated device is: shares of cores, periods, memory limits.

This file computes; it touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.errors import InputError

MOST_OF_MACHINE = 0.5  # the rest is for the wires, gloo's threads and whatever else runs
SHORTEST_RUN_US = 1000  # the kernel's smallest quota
SHORTEST_PERIOD_US = 8000  # two ticks of a 250 Hz kernel: at 3 ms a quota was kept to 20 % only
LONGEST_PERIOD_US = 1_000_000  # and its longest period
FASTEST_BYTES_PER_S = 125e6  # 1 Gbit/s
SHORTEST_LATENCY_S = 1e-3

Places = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Quota:
    """What a device may use: `cores` to compute, as `quota_us` in each `period_us`; and memory."""

    cores: float
    quota_us: int
    period_us: int
    memory_bytes: int


def quotas(cluster: Cluster, cores: int, share: float | None = None) -> Mapping[str, Quota]:
    """Return each device's quota, by name: shares of cores in proportion to `flops_per_s`.

    Args:
        cluster: the cluster to emulate; CPU devices.
        cores: what this machine has.
        share: cores of the fastest device; None makes the sum of all half of the machine, or less
            where a device would have more cores than threads.

    Raises:
        InputError: together they would have more than half of the machine, a device more cores
            than threads, or the slowest would compute too seldom.
    """
    fastest = max(device.flops_per_s for device in cluster.devices)
    parts = {device.name: device.flops_per_s / fastest for device in cluster.devices}
    budget = MOST_OF_MACHINE * cores
    threads = min(device.threads / parts[device.name] for device in cluster.devices)
    top = min(budget / sum(parts.values()), threads) if share is None else share
    _check(top, parts, budget, threads)
    longest_us = max(math.ceil(SHORTEST_RUN_US / (top * part)) for part in parts.values())
    period_us = max(SHORTEST_PERIOD_US, longest_us)
    if period_us > LONGEST_PERIOD_US:
        raise InputError(
            f"the slowest device would compute 1 ms in {period_us / 1000:.0f} ms, "
            f"more seldom than the kernel can arrange",
            help="emulate devices that are less unlike",
        )
    return {
        device.name: Quota(
            cores=top * parts[device.name],
            quota_us=max(SHORTEST_RUN_US, round(top * parts[device.name] * period_us)),
            period_us=period_us,
            memory_bytes=device.memory_bytes,
        )
        for device in cluster.devices
    }


def placed(quotas: Mapping[str, Quota], threads: Mapping[str, int], cpus: Sequence[int]) -> Places:
    """Say on which CPUs each device computes: the largest first, on those that have least to do.

    Left to itself the kernel may put all devices on one busy CPU, where they hold each other up.

    Args:
        quotas: of each device.
        threads: of each device; it gets as many CPUs.
        cpus: the numbers of those there are.
    """
    load, places = dict.fromkeys(cpus, 0.0), {}
    for name in sorted(quotas, key=lambda name: -quotas[name].cores):
        chosen = sorted(load, key=lambda cpu: load[cpu])[: threads[name]]
        places[name] = tuple(chosen)
        for cpu in chosen:
            load[cpu] += quotas[name].cores / len(chosen)
    return places


def _check(top: float, parts: Mapping[str, float], budget: float, threads: float) -> None:
    total = top * sum(parts.values())
    if top <= 0 or total > budget * (1 + 1e-9):
        raise InputError(
            f"the devices would have {total:.2f} cores together, more than half of this machine "
            f"({budget:g})",
            at="--share",
            help=f"give at most {budget / sum(parts.values()):.3f}, or leave it out",
        )
    if top > threads * (1 + 1e-9):
        raise InputError(
            f"a device would have {top:.2f} cores and cannot use them: it has fewer threads",
            at="--share",
            help=f"give at most {threads:.3f}, or more threads in the cluster file",
        )


def wires(cluster: Cluster, clamp: bool = False) -> list[tuple[int, int, Link]]:
    """Return (sender, receiver, link) for every ordered pair, by the devices' places in the file.

    Args:
        cluster: the cluster to emulate.
        clamp: take 1 Gbit/s and 1 ms for what is better than that.

    Raises:
        InputError: a link is faster or sooner than can be emulated, and `clamp` is not set.
    """
    names = [device.name for device in cluster.devices]
    return [
        (i, j, _emulable(a, b, cluster.link(a, b), clamp))
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    ]


def nics(cluster: Cluster) -> dict[tuple[int, int], tuple[tuple[str, float], ...]]:
    """Return, for pairs by place, what their messages share with others: see `Cluster.nics`."""
    names = [device.name for device in cluster.devices]
    found = {
        (i, j): cluster.nics(a, b)
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    }
    return {pair: passed for pair, passed in found.items() if passed}


def _emulable(a: str, b: str, link: Link, clamp: bool) -> Link:
    bytes_per_s = min(link.bytes_per_s, FASTEST_BYTES_PER_S)
    latency_s = max(link.latency_s, SHORTEST_LATENCY_S)
    if clamp or (bytes_per_s, latency_s) == (link.bytes_per_s, link.latency_s):
        return Link(latency_s, bytes_per_s)
    raise InputError(
        f"the link {a}-{b} has {link.bytes_per_s * 8e-9:.3g} Gbit/s and "
        f"{link.latency_s * 1e3:.3g} ms; at most 1 Gbit/s and at least 1 ms can be emulated",
        help="add --clamp to take the nearest that can",
    )
