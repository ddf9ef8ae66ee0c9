"""The sequences of devices to try along a pipeline, made of links and rates.

All orders of all subsets, where these are few; else a beam over links from every start, improved by
2-opt, and orders by speed, memory and host. What is found does not depend on the order in which a
cluster lists its devices: they are told apart by rates, then by links, then by name. It knows no
graph: who asks says about what a pipeline takes (`Rough`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.planning.contention import bytes_per_s

_BEAM = 24
_PER_LENGTH = 3
_IMPROVED = 4
_LONGEST_IMPROVED = 24
_LENGTHS = 16
_BYTES = 1 << 20

Path = tuple[int, ...]  # numbers of devices


@dataclass(frozen=True)
class Rough:
    """About what a pipeline takes: work is divided by speed, and every cut is alike.

    Attributes:
        whole_s: device -> the seconds of one micro-batch, all of it there.
        forward_bytes, backward_bytes: that cross a cut.
        micro_batches: in one step.
        held_bytes: that all devices together must hold at least.
    """

    whole_s: Mapping[str, float]
    forward_bytes: float
    backward_bytes: float
    micro_batches: int
    held_bytes: float = 0.0

    @staticmethod
    def of(cluster: Cluster) -> Rough:
        """Return what can be said without a graph: a work of 10 GFLOP, and cuts of 1 MiB."""
        whole = {device.name: 1e10 / device.flops_per_s for device in cluster.devices}
        return Rough(whole, _BYTES, _BYTES, 8)


def device_orders(
    cluster: Cluster, most: int, rough: Rough | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return orders of subsets of the devices, those that look best first.

    Args:
        cluster: the devices and their links.
        most: where all orders are more, promising ones are returned, not many more than so many.
            Devices that could change places without a difference count as one.
        rough: about what a pipeline takes; without it, of work and cuts of a middling size.
    """
    known = _Known(canonical(cluster), rough or Rough.of(cluster))
    every = list(islice(_distinct(known.kinds), most + 1))
    paths = every if len(every) <= most else list(_promising(known, most))
    names = known.names
    return tuple(tuple(names[i] for i in path) for path in known.ranked(paths))


def canonical(cluster: Cluster) -> Cluster:
    """Return the cluster with its devices in an order that its list has no part in.

    By what each does and holds, by its links and its neighbours' (as far as these differ), by name.
    """
    devices = sorted(cluster.devices, key=lambda device: _natural(device.name))
    colours = _colours(cluster, devices)
    ranked = sorted(range(len(devices)), key=lambda i: (colours[i], i))
    return replace(cluster, devices=tuple(devices[i] for i in ranked))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort "d10" after "d9"."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


# --------------------------------------------------------------------------- who is like whom


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
    """Return what a message meets: latency, seconds per byte, whether it leaves a shared host."""
    leaves = bool(cluster.hosts) and a.host != b.host
    latency_s = cluster.link(a.name, b.name).latency_s
    return latency_s, 1.0 / bytes_per_s(cluster, a.name, b.name), leaves


def _colours(cluster: Cluster, devices: Sequence[Device]) -> list[int]:
    """Number devices such that equal numbers have equal traits and, seen so, equal links."""
    wires = [[_wire(cluster, a, b) for b in devices] for a in devices]
    colours = _numbered([traits(device) for device in devices])
    while True:
        seen = [
            (colour, *sorted((wire, c) for wire, c in zip(row, colours, strict=True)))
            for colour, row in zip(colours, wires, strict=True)
        ]
        finer = _numbered(seen)
        if len(set(finer)) == len(set(colours)):
            return finer
        colours = finer


def _numbered(keys: Sequence[tuple[Any, ...]]) -> list[int]:
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    return [number[key] for key in keys]


class _Known:
    """A cluster in canonical order, and what its pipelines take, roughly."""

    def __init__(self, cluster: Cluster, rough: Rough) -> None:
        self.cluster, self.rough = cluster, rough
        self.devices = cluster.devices
        self.names = [device.name for device in self.devices]
        self.colours = _colours(cluster, self.devices)
        self.speed = [1.0 / max(rough.whole_s[name], 1e-300) for name in self.names]
        self.trip_s = [[self._trip_s(a, b) for b in self.devices] for a in self.devices]
        self.wire_s = [[self._wire_s(a, b) for b in self.devices] for a in self.devices]

    @cached_property
    def kinds(self) -> list[int]:
        """The first device that each could change places with; itself, maybe."""
        devices = self.devices
        wires = [[_wire(self.cluster, a, b) for b in devices] for a in devices]

        def swappable(a: int, b: int) -> bool:
            if self.colours[a] != self.colours[b]:
                return False
            others = (i for i in range(len(wires)) if i not in (a, b))
            return all(wires[a][i] == wires[b][i] for i in others)

        found: list[int] = []
        for i in range(len(devices)):
            firsts = (j for j in range(i) if found[j] == j and swappable(j, i))
            found.append(next(firsts, i))
        return found

    def step_s(self, path: Path) -> float:
        """Return about what a step takes on a path of devices."""
        share_s = 1.0 / sum(self.speed[i] for i in path)
        hops = list(pairwise(path))
        busy_s = max([share_s, *(self.wire_s[a][b] for a, b in hops)])
        alone_s = len(path) * share_s + sum(self.trip_s[a][b] for a, b in hops)
        return alone_s + (self.rough.micro_batches - 1) * busy_s

    def links_s(self, path: Path) -> float:
        """Return what only the links of a path take of a step."""
        hops = list(pairwise(path))
        busy_s = max((self.wire_s[a][b] for a, b in hops), default=0.0)
        trips_s = sum(self.trip_s[a][b] for a, b in hops)
        return trips_s + (self.rough.micro_batches - 1) * busy_s

    def ranked(self, paths: Iterable[Path]) -> list[Path]:
        """Return paths, the best first, but soon one of each length; too small ones last."""
        found = sorted(dict.fromkeys(paths), key=lambda p: (self._is_small(p), self._about(p), p))
        firsts = {len(path): path for path in reversed(found)}
        place = {path: i for i, path in enumerate(found)}
        soon = sorted(firsts.values(), key=place.__getitem__)
        return list(dict.fromkeys([*found[:_PER_LENGTH], *soon, *found]))

    def _about(self, path: Path) -> tuple[float, int]:
        return float(f"{self.step_s(path):.9e}"), -len(path)

    def _is_small(self, path: Path) -> bool:
        return sum(self.devices[i].memory_bytes for i in path) < self.rough.held_bytes

    def _trip_s(self, a: Device, b: Device) -> float:
        rough = self.rough
        total = rough.forward_bytes + rough.backward_bytes
        ways = 1 + (rough.backward_bytes > 0)
        latency_s = self.cluster.link(a.name, b.name).latency_s
        handled_s = sum(
            end.overheads.message_s * ways + total / (end.overheads.message_bytes_per_s or 1e300)
            for end in (a, b)
        )
        wire_s = total / bytes_per_s(self.cluster, a.name, b.name)
        return wire_s + ways * latency_s + handled_s

    def _wire_s(self, a: Device, b: Device) -> float:
        nbytes = max(self.rough.forward_bytes, self.rough.backward_bytes)
        return nbytes / bytes_per_s(self.cluster, a.name, b.name)


# --------------------------------------------------------------------------- orders


def _distinct(kinds: Sequence[int]) -> Iterator[Path]:
    """Yield every order of every subset; devices that could change places are taken in order."""

    def extend(taken: Path) -> Iterator[Path]:
        if taken:
            yield taken
        for i in _next(kinds, taken):
            yield from extend((*taken, i))

    return extend(())


def _next(kinds: Sequence[int], taken: Path) -> Iterator[int]:
    """Yield the first device of each kind that is not taken."""
    seen: set[int] = set()
    for i, kind in enumerate(kinds):
        if i not in taken and kind not in seen:
            seen.add(kind)
            yield i


def _promising(known: _Known, most: int) -> Iterator[Path]:
    """Yield what a beam finds by step and by links, what 2-opt makes of the best, and sorted ones.

    Mirror images are yielded, too: a model is not the same from its two ends.
    """
    whole = len(known.devices)
    beams = [_beam(known, known.step_s), _beam(known, known.links_s)]
    found = [path for length in zip(*beams, strict=True) for paths in length for path in paths]
    best = sorted(found, key=lambda path: (known.step_s(path), path))[:_IMPROVED]
    longest = [path for path in found if len(path) == whole][:_IMPROVED]
    better = [_improved(known, path) for path in (*best, *longest)]
    step = max(1, -(-whole * 12 // most), whole // _LENGTHS)
    lengths = {*range(whole, 1, -step), 1}
    kept = [path for path in found if len(path) in lengths]
    for path in (*better, *kept, *_sorted(known, lengths)):
        yield path
        yield path[::-1]


def _beam(known: _Known, score_s: Callable[[Path], float]) -> list[list[Path]]:
    """Return, for each length, the best paths of those that extend the best ones before."""
    paths: list[Path] = [(i,) for i in _next(known.kinds, ())]
    found = []
    for _ in known.devices:
        alike: dict[tuple[object, ...], Path] = {}
        for path in paths:
            alike.setdefault(_signature(known, path), path)
        ranked = sorted(alike.values(), key=lambda path: (score_s(path), path))[:_BEAM]
        found.append(ranked[:_PER_LENGTH])
        paths = [(*path, i) for path in ranked for i in _next(known.kinds, path)]
    return found


def _signature(known: _Known, path: Path) -> tuple[object, ...]:
    """Return what tells paths apart that use different devices of one kind of neighbourhood."""
    hops = (known.trip_s[a][b] for a, b in pairwise(path))
    return (*(known.colours[i] for i in path), *hops)


def _improved(known: _Known, path: Path) -> Path:
    """Return what 2-opt makes of a path: parts reversed, moved, changed for unused devices."""
    best, best_s = path, known.step_s(path)
    improved = 1 < len(path) <= _LONGEST_IMPROVED
    while improved:
        improved = False
        for other in neighbours(best, len(known.devices)):
            other_s = known.step_s(other)
            if other_s < best_s * (1 - 1e-9):
                best, best_s, improved = other, other_s, True
                break
    return best


def neighbours(path: Path, devices: int) -> Iterator[Path]:
    """Yield the paths of as many devices that are one change away."""
    count = len(path)
    for first in range(count):
        for after in range(first + 2, count + 1):
            yield (*path[:first], *path[first:after][::-1], *path[after:])
    for at in range(count):
        rest = (*path[:at], *path[at + 1 :])
        yield from ((*rest[:to], path[at], *rest[to:]) for to in range(count) if to != at)
        unused = (i for i in range(devices) if i not in path)
        yield from ((*path[:at], i, *path[at + 1 :]) for i in unused)


def _sorted(known: _Known, lengths: Iterable[int]) -> Iterator[Path]:
    """Yield beginnings of the devices sorted by speed, memory and host."""
    devices, every = known.devices, range(len(known.devices))
    whole = [
        tuple(every),
        tuple(sorted(every, key=lambda i: (-devices[i].memory_bytes, i))),
        tuple(sorted(every, key=lambda i: (devices[i].memory_bytes, i))),
        tuple(sorted(every, key=lambda i: (devices[i].host, i))),
    ]
    for length in sorted(lengths, reverse=True):
        yield from (order[:length] for order in whole)
        yield from (order[::-1][:length] for order in whole[:1])
