"""What the devices of a host share: how fast each is while all of them compute, and while some do.

A cluster's devices have the rates that each has alone. Hosts say what their devices share:

    cores               threads of all its CPU devices beyond them take turns
    memory_bandwidth    CPU devices that together would move more get shares, by what each would

GPUs compute on cores and in memory of their own. It knows devices and hosts; it knows no graphs, no
times and no messages (that these take turns on a NIC is the simulator's).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from bigbrain_fx.core import Cluster, Device, Host

_SCARCE = 1 + 1e-9  # shares that were added up again may be a rounding above the whole


def crowded(cluster: Cluster) -> Cluster:
    """Return the cluster with the rates that its devices have while all of them compute.

    In a pipeline that is most of the time. Nothing is left to share but NICs; a cluster whose hosts
    share nothing else comes back as it is.
    """
    crowds = Crowds(cluster)
    if not crowds.any:
        return cluster
    return replace(
        cluster,
        devices=tuple(map(crowds.slowed, cluster.devices)),
        hosts=tuple(Host(host.name, host.nic_bytes_per_s) for host in cluster.hosts),
    )


def bytes_per_s(cluster: Cluster, a: str, b: str) -> float:
    """Return the rate of a message that shares its link and NICs with nobody."""
    return cluster.wire(a, b).bytes_per_s


@dataclass(frozen=True)
class Crowds:
    """Who slows whom on the hosts of a cluster."""

    cluster: Cluster

    @cached_property
    def _crowd(self) -> Mapping[str, _Crowd]:
        """The crowd of each host where something is scarce."""
        devices = self.cluster.devices
        crowds = {
            host.name: _Crowd(host, tuple(d for d in devices if _shares(d, host)))
            for host in self.cluster.hosts
        }
        return {name: crowd for name, crowd in crowds.items() if crowd.most > _SCARCE}

    @property
    def any(self) -> bool:
        """Whether any device is ever slowed by another."""
        return bool(self._crowd)

    def slowed(self, device: Device) -> Device:
        """Return a device as it is while all its neighbours compute."""
        crowd = self._crowd.get(device.host)
        return device if crowd is None or device not in crowd.devices else crowd.slowed(device)

    def level(self, device: str, computing: Collection[str]) -> float:
        """Return how crowded a device's host is: from 0.0, it is alone, to 1.0, all compute."""
        crowd = self._crowd.get(self.cluster.device[device].host)
        return 0.0 if crowd is None else crowd.level(computing)


def _shares(device: Device, host: Host) -> bool:
    return device.host == host.name and device.kind == "cpu"


@dataclass(frozen=True)
class _Crowd:
    """The CPU devices of one host."""

    host: Host
    devices: tuple[Device, ...]

    @cached_property
    def most(self) -> float:
        """How much longer what is scarce takes while all of them compute."""
        return self._stretch(self.devices)

    def level(self, computing: Collection[str]) -> float:
        here = [device for device in self.devices if device.name in computing]
        return (self._stretch(here) - 1.0) / (self.most - 1.0)

    def slowed(self, device: Device) -> Device:
        turns, moving = self._turns(self.devices), self._moving(self.devices)
        half = device.half_flops_per_s
        return replace(
            device,
            flops_per_s=device.flops_per_s / turns,
            half_flops_per_s=None if half is None else half / turns,
            memory_bytes_per_s=device.memory_bytes_per_s / (turns * moving),
            launch_s=device.launch_s * turns,
            core_share=1 / turns,
            memory_share=1 / (turns * moving),
        )

    def _stretch(self, devices: Collection[Device]) -> float:
        return self._turns(devices) * self._moving(devices)

    def _turns(self, devices: Collection[Device]) -> float:
        """Return how many threads there are for each core; 1.0 where there are cores enough."""
        if self.host.cores is None:
            return 1.0
        return max(1.0, sum(d.threads for d in devices) / self.host.cores)

    def _moving(self, devices: Collection[Device]) -> float:
        """Return how many times the host's memory bandwidth its devices would take, at least 1."""
        if self.host.memory_bytes_per_s is None:
            return 1.0
        wanted = sum(d.memory_bytes_per_s for d in devices) / self._turns(devices)
        return max(1.0, wanted / self.host.memory_bytes_per_s)
