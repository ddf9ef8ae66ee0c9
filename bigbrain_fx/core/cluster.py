"""The cluster as data: devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the cluster; rates are what it sustains, not what its datasheet promises.

    `launch_s` is what starting one op costs; `threads` are CPU threads its process computes with.
    """

    name: str
    host: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 5e-6
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: a message of n bytes takes latency_s + n / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, nbytes: int) -> float:
        """Seconds for one message of `nbytes` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """The devices, in pipeline order unless a planner finds a better one, and their links."""

    devices: tuple[Device, ...]
    default_link: Link
    links: tuple[tuple[str, str, Link], ...] = ()

    @cached_property
    def device(self) -> Mapping[str, Device]:
        """Device by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def _link(self) -> Mapping[tuple[str, str], Link]:
        pairs = {}
        for a, b, link in self.links:
            pairs[a, b] = pairs[b, a] = link
        return pairs

    def link(self, a: str, b: str) -> Link:
        """Return the link between devices `a` and `b`; within one device moving data is free."""
        if a == b:
            return Link(0.0, float("inf"))
        return self._link.get((a, b), self.default_link)
