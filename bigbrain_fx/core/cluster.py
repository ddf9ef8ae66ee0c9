"""The cluster as data: devices, and the links between them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from bigbrain_fx.core.showing import Shown

MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]
"""What torch multiplies float32 matrices in: float32, or TF32 where the device has it."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times of a device's process beside computing; all zero unless somebody measured it.

    Attributes:
        message_s: its own time for each message that it sends or receives.
        message_bytes_per_s: and what it handles of its bytes: copies, the kernel's part; None for
            no time.
        instruction_s: around each forward and each backward of a stage.
        step_s: once a step, before its first instruction: the data loader, posted receives.
        blocking: whether a device that sends to another stage waits until it is there, and begins
            nothing meanwhile; so Megatron-DeepSpeed sends. Ours compute as messages fly.
    """

    message_s: float = 0.0
    message_bytes_per_s: float | None = None
    instruction_s: float = 0.0
    step_s: float = 0.0
    blocking: bool = False

    def handling_s(self, nbytes: int) -> float:
        """Seconds that one end of a message of `nbytes` bytes takes."""
        rate = self.message_bytes_per_s
        return self.message_s if rate is None else self.message_s + nbytes / rate


NO_OVERHEADS = Overheads()

BLAS_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
BLAS_BYTES_FROM_HOPPER_ON = 4096 * 8 * 1024


def blas_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace that torch gives a cuBLAS handle on a card of a compute capability.

    Unless CUBLAS_WORKSPACE_CONFIG says another: ":4096:2:16:8", and 32 MiB from Hopper on
    (ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).
    """
    major, _ = capability
    return BLAS_BYTES_FROM_HOPPER_ON if major in (9, 10, 12) else BLAS_BYTES


@dataclass(frozen=True, slots=True)
class Host:
    """Resources that the devices of one host share; None stands for enough for all of them.

    Attributes:
        nic_bytes_per_s: of all messages that leave the host together, and of all that enter it.
        memory_bytes_per_s: of all its CPU devices together.
        cores: that the threads of all its CPU devices share.
    """

    name: str
    nic_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the cluster; rates are what it sustains, not what its datasheet promises.

    Where hosts say what their devices share, rates are those of the device alone.

    `launch_s` is what starting one op costs; on a CUDA device its process's time, which passes
    while the device works. `threads` are CPU threads its process computes with.
    `half_flops_per_s` is the rate of products in float16 and bfloat16; None: `flops_per_s`. What
    is in `lacks` has the latter's, too.
    `tf32_flops_per_s` is the rate in TF32, which convolutions take by default, and products where
    `matmul_precision` is "high", as in `torch.set_float32_matmul_precision`; None: it has no TF32.
    `preset` is the name of the card whose datasheet rates come from; "": of none.
    `units` are its multiprocessors, over which a product's tiles are spread; None: not known.
    `blas_bytes` is the workspace of a cuBLAS handle on a CUDA device; None: nobody has said it.
    `processor` is its own name, as profiles have it: times of ops profiled on it are used as they
    are. "": its rates say how fast it is. `core_share` and `memory_share` are of what it has alone,
    where a host's devices compute at once. `kernels` are the seconds that calls of `core.KERNELS`
    were timed at on it, by name, in that order; empty: nobody has. `process_bytes` is what its
    process takes beside tensors: context, kernels, NCCL, a framework; None: as usual of its kind.
    """

    name: str
    host: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 5e-6
    threads: int = 1
    overheads: Overheads = NO_OVERHEADS
    half_flops_per_s: float | None = None
    blas_bytes: int | None = None
    tf32_flops_per_s: float | None = None
    matmul_precision: MatmulPrecision = "highest"
    lacks: tuple[str, ...] = ()
    preset: str = ""
    units: int | None = None
    processor: str = ""
    core_share: float = 1.0
    memory_share: float = 1.0
    kernels: tuple[tuple[str, float], ...] = ()
    process_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: a message of n bytes takes latency_s + wire_s(n).

    Attributes:
        bytes_per_s: of large messages; no smaller one is faster.
        by_size: (bytes, bytes per second) of smaller messages, ascending; see `wire_s`.
        usd_per_gb: what 10**9 bytes over it cost, either way.
    """

    latency_s: float
    bytes_per_s: float
    by_size: tuple[tuple[int, float], ...] = ()
    usd_per_gb: float = 0.0

    def wire_s(self, nbytes: int) -> float:
        """Seconds that a message occupies the link.

        Below the first size of the table at its rate, between two sizes linear in time, above the
        last at `bytes_per_s`.
        """
        if not self.by_size:
            return nbytes / self.bytes_per_s
        place = bisect_right(self.by_size, (nbytes, math.inf))
        if not place:
            return nbytes / self.by_size[0][1]
        size, rate = self.by_size[place - 1]
        if place == len(self.by_size):
            return size / rate + (nbytes - size) / self.bytes_per_s
        more, faster = self.by_size[place]
        return size / rate + (nbytes - size) * (more / faster - size / rate) / (more - size)

    def transfer_s(self, nbytes: int) -> float:
        """Seconds for one message of `nbytes` bytes."""
        return self.latency_s + self.wire_s(nbytes)


@dataclass(frozen=True, slots=True)
class Period:
    """Hours of a training in which the same devices are there."""

    from_h: float
    until_h: float
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Zone:
    """Hosts of one place; between places links are slow, and a provider may charge for bytes."""

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceStore:
    """Offload target of a device: it keeps tensors not needed now; `bytes_per_s` holds either way.

    `folder` is on a disk of the device's host; "" stands for its host's memory.
    """

    name: str
    device: str
    capacity_bytes: int
    bytes_per_s: float
    folder: str = ""


@dataclass(frozen=True, repr=False)
class Cluster(Shown):
    """The devices, in pipeline order unless a planner finds a better one, and their links.

    `hosts` are those whose devices share something that is scarce. `replicas` are the devices of
    each copy of the model, where the user has said so. A device has one of the `stores`, or none.
    `prices` are US dollars by the hour, by the name of a device: of those that have one. `zones`
    are for reading; what links them is in `links`.
    """

    devices: tuple[Device, ...]
    default_link: Link
    links: tuple[tuple[str, str, Link], ...] = ()
    hosts: tuple[Host, ...] = ()
    replicas: tuple[tuple[str, ...], ...] = ()
    stores: tuple[DeviceStore, ...] = ()
    prices: tuple[tuple[str, float], ...] = ()
    zones: tuple[Zone, ...] = ()

    def __str__(self) -> str:
        """Show a line per device."""
        hosts = dict.fromkeys(device.host for device in self.devices)
        lines = [f"{len(self.devices)} devices on {', '.join(hosts)}"]
        for each in self.devices:
            memory = f"{each.memory_bytes / 2**30:.1f} GiB"
            rate = f"{each.flops_per_s / 1e9:.0f} GFLOP/s"
            lines.append(f"  {each.name}: {each.kind} on {each.host}, {memory}, {rate}")
        return "\n".join(lines)

    @cached_property
    def device(self) -> Mapping[str, Device]:
        """Device by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def store(self) -> Mapping[str, DeviceStore]:
        """Each device's store, by the name of the device."""
        return {store.device: store for store in self.stores}

    @cached_property
    def price(self) -> Mapping[str, float]:
        """US dollars by the hour, by the name of a device; none of those without a price."""
        return dict(self.prices)

    @cached_property
    def zone(self) -> Mapping[str, str]:
        """Each device's zone, by the name of the device, where there are zones."""
        of_host = {host: zone.name for zone in self.zones for host in zone.hosts}
        return {d.name: of_host[d.host] for d in self.devices if d.host in of_host}

    @cached_property
    def _link(self) -> Mapping[tuple[str, str], Link]:
        pairs = {}
        for a, b, link in self.links:
            pairs[a, b] = pairs[b, a] = link
        return pairs

    @cached_property
    def _nic(self) -> Mapping[str, tuple[str, float]]:
        rates = {host.name: host.nic_bytes_per_s for host in self.hosts}
        found = ((d.name, d.host, rates.get(d.host)) for d in self.devices)
        return {name: (host, rate) for name, host, rate in found if rate is not None}

    @property
    def has_shared_nics(self) -> bool:
        """Whether messages between some devices may wait for messages of others."""
        return bool(self._nic)

    def nics(self, a: str, b: str) -> tuple[tuple[str, float], ...]:
        """Return what a message from `a` to `b` shares with others: (name, bytes per second)."""
        if self.device[a].host == self.device[b].host:
            return ()
        sides = (("out of", a), ("into", b))
        return tuple(
            (f"{way} {self._nic[end][0]}", self._nic[end][1])
            for way, end in sides
            if end in self._nic
        )

    def link(self, a: str, b: str) -> Link:
        """Return the link between devices `a` and `b`; within one device moving data is free."""
        if a == b:
            return Link(0.0, float("inf"))
        return self._link.get((a, b), self.default_link)

    def wire(self, a: str, b: str) -> Link:
        """Return the link between two devices, at the rate of a message alone on it and on NICs."""
        link = self.link(a, b)
        slowest = min((rate for _, rate in self.nics(a, b)), default=link.bytes_per_s)
        if slowest >= link.bytes_per_s:
            return link
        capped = tuple((size, min(rate, slowest)) for size, rate in link.by_size)
        return replace(link, bytes_per_s=slowest, by_size=capped)
