"""Groups of identical devices: by their fields, by what ops cost there, by their links.

Plans therefore depend neither on names nor on the order in which a cluster lists its devices. This
file has the one rule: `nameless` for a device by itself, `seen_devices` for one in its place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from bigbrain_fx.core import Cluster, Costs, Device, Host, OpCost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.intp]


# ------------------------------------------------------------------------------------------------
# What the devices of a host share: how fast each is while all of them compute, and while some do.
#
# A cluster's devices have the rates that each has alone. Hosts say what their devices share:
#
#   cores               threads of all its CPU devices beyond them take turns
#   memory_bandwidth    CPU devices that together would move more get shares, by what each would
#
# GPUs compute on cores and in memory of their own.


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
    """Contention of devices on the hosts of a cluster."""

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
        """Return the contention on a device's host: from 0.0, it is alone, to 1.0, all compute."""
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


# ------------------------------------------------------------------------------------------------
# Which devices of a cluster are alike: by what they are, by what ops cost there, by their links.


def nameless(device: Device) -> Device:
    """Return what a device is, whatever it and its host are called."""
    return replace(device, name="", host="")


def canonical(cluster: Cluster, costs: Costs) -> Cluster:
    """Return the cluster with its devices in an order that names and the list have no part in.

    By what each does and holds, by what ops cost there, by its links and its neighbours' (as far as
    these differ). Of devices that could change places the first by name comes first.
    """
    return replace(cluster, devices=seen_devices(cluster, ranks_of(cluster, costs)).devices)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort "d10" after "d9"."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


# --------------------------------------------------------------------------- one device

_NAMES = ("name", "host")
_MORE_IS_BETTER = ("flops_per_s", "memory_bytes_per_s", "memory_bytes")


def traits(device: Device) -> tuple[Any, ...]:
    """Return all that a device is but its names, as what compares; the fastest come first."""
    others = (f.name for f in fields(Device) if f.name not in (*_NAMES, *_MORE_IS_BETTER))
    rates = (-getattr(device, name) for name in _MORE_IS_BETTER)
    return (*rates, *(_comparable(getattr(device, name)) for name in others))


def _comparable(value: object) -> tuple[Any, ...]:
    """Return what compares with other values of a field; None comes before any of them."""
    if value is None:
        return ()
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(map(_comparable, astuple(value)))
    return (value,)


def _own(cluster: Cluster, device: Device) -> tuple[Any, ...]:
    """Return a device's traits, and those of its store and its host."""
    store = cluster.store.get(device.name)
    host = next((each for each in cluster.hosts if each.name == device.host), None)
    beside = (
        store and replace(store, name="", device="", folder=store.folder and "/"),
        host and replace(host, name=""),
    )
    return (*traits(device), *map(_comparable, beside))


# --------------------------------------------------------------------------- costs

_COST = attrgetter(*(f.name for f in fields(OpCost)))


def cost_ranks(costs: Costs) -> Mapping[str, int]:
    """Number devices by what ops cost there: those of the least work have the least number.

    Two have one number where each op, and the optimizer, costs the same on both.
    """
    tables = {id(ops): ops for ops in costs.ops.values()}
    of_table = _ranked({number: _of_table(ops) for number, ops in tables.items()})
    own = {
        device: (
            of_table[id(ops)],
            costs.optimizer_s_per_byte.get(device, 0.0),
            costs.optimizer_s_per_tensor.get(device, 0.0),
        )
        for device, ops in costs.ops.items()
    }
    return _ranked(own)


def ranks_of(cluster: Cluster, costs: Costs) -> tuple[int, ...]:
    """Return the ranks of a cluster's devices, in its order, as `seen_devices` takes them."""
    ranks = cost_ranks(costs)
    return tuple(ranks[device.name] for device in cluster.devices)


def _of_table(ops: Mapping[str, OpCost]) -> tuple[Any, ...]:
    whole_s = sum(cost.forward_s + cost.backward_s for cost in ops.values())
    return whole_s, tuple((name, _COST(cost)) for name, cost in ops.items())


def _ranked(keys: Mapping[Any, Any]) -> dict[Any, int]:
    """Return each key's place among the unlike ones."""
    number = {key: i for i, key in enumerate(sorted(set(keys.values())))}
    return {name: number[key] for name, key in keys.items()}


# --------------------------------------------------------------------------- devices in places

MOST_TOLD_APART = 256
"""Devices of which those that only look alike are told apart further; it takes a while."""

_Wire = tuple[float, float, bool]


@dataclass(frozen=True)
class SeenDevices:
    """Devices in an order that names and their list have no part in, and what tells them apart.

    Attributes:
        devices: in this order.
        wires: device -> device -> the number of what a message from one to the other meets.
        colours: equal where traits and, as far as these differ, links and neighbours are.
        kinds: the first device that each could change places with; itself, maybe.
    """

    devices: tuple[Device, ...]
    wires: list[list[int]]
    colours: list[int]
    kinds: list[int]

    @staticmethod
    def of(cluster: Cluster, ranks: Sequence[int] = (), *, by_host: bool = False) -> SeenDevices:
        """Look at a cluster; its pairs of devices are asked for once, they may be a million.

        Args:
            cluster: the devices and their links.
            ranks: of the devices, where more than their traits tells them apart.
            by_host: whether to share a host counts, even one that has nothing scarce.
        """
        import numpy as np  # not with every import of a plan

        rank = dict(zip(cluster.device, ranks or [0] * len(cluster.devices), strict=True))
        devices = sorted(cluster.devices, key=lambda device: natural(device.name))
        keys = _ranked({d.name: (*_own(cluster, d), rank[d.name]) for d in devices})
        wires = _wires(cluster, devices, by_host=by_host or bool(cluster.hosts))
        colours = _refined(np.array([*keys.values()], dtype=np.intp), wires)
        order = np.argsort(_told_apart(colours, wires), kind="stable")
        wires, colours = wires[np.ix_(order, order)], colours[order]
        return SeenDevices(
            tuple(devices[i] for i in order.tolist()),
            wires.tolist(),
            colours.tolist(),
            _kinds(colours, wires),
        )

    @cached_property
    def walk(self) -> tuple[Device, ...]:
        """The devices such that each is as near to the one before it as any that is left."""
        left = list(range(1, len(self.devices)))
        found = [0]
        while left:
            near = self.wires[found[-1]]
            nearest = min(left, key=lambda i: (near[i], i))
            left.remove(nearest)
            found.append(nearest)
        return tuple(self.devices[i] for i in found)


def near_first(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices such that those with quick ways between them follow each other.

    Neither names nor the list have a part in it; of very many devices host by host, and no link is
    looked at.
    """
    if len(cluster.devices) <= MOST_TOLD_APART:
        return seen_devices(cluster).walk
    return by_hosts(cluster)


def by_hosts(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices host by host, the hosts of the fastest first, then by name."""
    hosts: dict[str, list[Device]] = {}
    for device in sorted(cluster.devices, key=lambda each: (traits(each), natural(each.name))):
        hosts.setdefault(device.host, []).append(device)
    ranked = sorted(hosts.values(), key=lambda own: ([*map(traits, own)], natural(own[0].host)))
    return tuple(device for own in ranked for device in own)


def interchangeable(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the devices' names in groups within which any two could change places."""
    seen = seen_devices(cluster, by_host=True)
    groups: dict[int, list[str]] = {}
    for device, kind in zip(seen.devices, seen.kinds, strict=True):
        groups.setdefault(kind, []).append(device.name)
    return tuple(map(tuple, groups.values()))


@lru_cache(maxsize=8)
def seen_devices(
    cluster: Cluster, ranks: tuple[int, ...] = (), *, by_host: bool = False
) -> SeenDevices:
    """Look at a cluster once, for every number of micro-batches."""
    return SeenDevices.of(cluster, ranks, by_host=by_host)


def _wires(cluster: Cluster, devices: Sequence[Device], *, by_host: bool) -> Numbers:
    """Number what a message meets between each two devices: the quickest way has the least."""
    import numpy as np

    met = [[_wire(cluster, a, b, by_host=by_host) for b in devices] for a in devices]
    number = {wire: i for i, wire in enumerate(sorted({w for row in met for w in row}))}
    return np.array([[number[wire] for wire in row] for row in met], dtype=np.intp)


def _wire(cluster: Cluster, a: Device, b: Device, *, by_host: bool) -> _Wire:
    """Return what a message meets: latency, minus the rate, whether it leaves its host."""
    latency_s = cluster.link(a.name, b.name).latency_s
    return latency_s, -bytes_per_s(cluster, a.name, b.name), by_host and a.host != b.host


def _refined(colours: Numbers, wires: Numbers) -> Numbers:
    """Tell devices of one colour apart by the colours at the ends of their wires, again and again.

    The colours' own order is kept; among devices of one colour, more of the least wires come first.
    """
    import numpy as np

    while True:
        ends = np.sort(wires * (colours.max() + 1) + colours, axis=1)
        seen = np.concatenate((colours[:, None], ends), axis=1)
        finer = np.unique(seen, axis=0, return_inverse=True)[1].reshape(-1)
        if finer.max() == len(set(colours.tolist())) - 1:
            return finer
        colours = finer


def _told_apart(colours: Numbers, wires: Numbers) -> Numbers:
    """Refine until devices of one colour could all change places: the first of a colour is marked.

    Where a cluster is symmetric, devices of one colour are symmetric, too, and any of them may be
    first. Devices near the first then come before those far from it. Of very many devices names
    decide.
    """
    while len(colours) <= MOST_TOLD_APART:
        unlike = _first_unlike(colours, wires)
        if unlike is None:
            break
        marked = 2 * colours + 1
        marked[unlike] -= 1
        colours = _refined(marked, wires)
    return colours


def _first_unlike(colours: Numbers, wires: Numbers) -> int | None:
    """Return the first device of the first colour whose devices could not all change places."""
    kinds = _kinds(colours, wires)
    firsts: dict[int, int] = {}
    for colour, kind in sorted(zip(colours.tolist(), kinds, strict=True)):
        if firsts.setdefault(colour, kind) != kind:
            return firsts[colour]
    return None


def _kinds(colours: Numbers, wires: Numbers) -> list[int]:
    """Return the first device that each could change places with; itself, maybe."""
    found: list[int] = []
    firsts: dict[int, list[int]] = {}
    for i, colour in enumerate(colours.tolist()):
        alike = firsts.setdefault(colour, [])
        found.append(next((j for j in alike if _could_swap(wires, j, i)), i))
        if found[i] == i:
            alike.append(i)
    return found


def _could_swap(wires: Numbers, a: int, b: int) -> bool:
    """Whether two devices of one colour meet the same on the way to every third."""
    unlike = wires[a] != wires[b]
    unlike[a] = unlike[b] = False
    return not unlike.any()


# --------------------------------------------------------------------------- many devices


MOST_DEVICES = 1024


def looked_at(cluster: Cluster, most: int = MOST_DEVICES) -> Cluster:
    """Return the devices that a search looks at, in the order of the cluster: all, if not too many.

    Hosts go by their devices' rates, then by name; of the last one it may be some devices only.
    """
    if len(cluster.devices) <= most:
        return cluster
    taken = {device.name for device in by_hosts(cluster)[:most]}
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in taken),
        links=tuple((a, b, link) for a, b, link in cluster.links if {a, b} <= taken),
        stores=tuple(store for store in cluster.stores if store.device in taken),
        replicas=(),
    )


def of_how_many(cluster: Cluster, most: int = MOST_DEVICES) -> str:
    """Say how many devices are looked at, of how many; nothing where that is all."""
    count = len(cluster.devices)
    return "" if count <= most else f"on {most:,} of {count:,} devices"
