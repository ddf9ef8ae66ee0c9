"""The sequences of devices to try along a pipeline, made of links and rates.

All orders of all subsets, where these are few; else a beam over links from every start, and orders
by speed, memory and host. The result does not depend on the order in which a cluster lists its
devices (`device_kinds`). The module does not know graphs: the caller estimates what a pipeline
takes (`Rough`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.planning.device_kinds import bytes_per_s, seen_devices

_BEAM = 24
_PER_LENGTH = 3
_LENGTHS = 16

Path = tuple[int, ...]  # numbers of devices


@dataclass(frozen=True)
class Rough:
    """Rough step time of a pipeline: work is divided by speed, and all cuts are identical.

    Attributes:
        whole_s: device -> the seconds of one micro-batch, all of it there.
        forward_bytes, backward_bytes: that cross a cut.
        micro_batches: in one step.
        held_bytes: that all devices together must hold at least.
        ranks: device -> a number, equal where all ops cost the same; empty: traits tell it.
    """

    whole_s: Mapping[str, float]
    forward_bytes: float
    backward_bytes: float
    micro_batches: int
    held_bytes: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)


def device_orders(cluster: Cluster, most: int, rough: Rough) -> tuple[tuple[str, ...], ...]:
    """Return orders of subsets of the devices, those that look best first.

    Args:
        cluster: the devices and their links.
        most: where all orders are more, promising ones are returned, not many more than so many.
            Devices that could change places without a difference count as one.
        rough: about what a pipeline takes.
    """
    known = _Known(cluster, rough)
    every = list(islice(_distinct(known.kinds), most + 1))
    paths = every if len(every) <= most else list(_promising(known, most))
    names = known.names
    return tuple(tuple(names[i] for i in path) for path in known.ranked(paths))


@dataclass(frozen=True, slots=True)
class _PathSums:
    """Terms of the time of a step on a path.

    Attributes:
        speed: of all devices together, in whole micro-batches a second.
        trips_s: of one micro-batch over all hops.
        wire_s: of the slowest hop.
    """

    speed: float
    trips_s: float = 0.0
    wire_s: float = 0.0


class _Known:
    """A cluster in canonical order, and what its pipelines take, roughly."""

    def __init__(self, cluster: Cluster, rough: Rough) -> None:
        ranks = tuple(rough.ranks.get(device.name, 0) for device in cluster.devices)
        self.rough, self.seen = rough, seen_devices(cluster, ranks)
        self.cluster, self.devices = cluster, self.seen.devices
        self.names = [device.name for device in self.devices]
        self.colours = self.seen.colours
        self.speed = [1.0 / max(rough.whole_s[name], 1e-300) for name in self.names]
        self._trip: dict[tuple[int, int, int], float] = {}
        self._wire: dict[int, float] = {}

    @property
    def kinds(self) -> list[int]:
        """The first device that each could change places with; itself, maybe."""
        return self.seen.kinds

    def begun(self, i: int) -> _PathSums:
        """Return the sums of a path of one device."""
        return _PathSums(self.speed[i])

    def longer(self, sums: _PathSums, last: int, i: int) -> _PathSums:
        """Return the sums of a path that goes on from its last device to another."""
        return _PathSums(
            sums.speed + self.speed[i],
            sums.trips_s + self.trip_s(last, i),
            max(sums.wire_s, self.wire_s(last, i)),
        )

    def sums(self, path: Path) -> _PathSums:
        """Add up what a step on a path is made of."""
        speed, trips_s, wire_s = self.speed[path[0]], 0.0, 0.0
        for last, i in pairwise(path):  # as `longer`, without an object for each hop
            speed += self.speed[i]
            trips_s += self.trip_s(last, i)
            wire_s = max(wire_s, self.wire_s(last, i))
        return _PathSums(speed, trips_s, wire_s)

    def step_of(self, sums: _PathSums, length: int) -> float:
        """Return about what a step takes, in seconds."""
        share_s = 1.0 / sums.speed
        alone_s = length * share_s + sums.trips_s
        return alone_s + (self.rough.micro_batches - 1) * max(share_s, sums.wire_s)

    def step_s(self, path: Path) -> float:
        """Return about what a step takes on a path of devices."""
        return self.step_of(self.sums(path), len(path))

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

    def trip_s(self, a: int, b: int) -> float:
        """Return the seconds of one micro-batch from one device to another, and back."""
        # of one colour and over one wire it is the same: a million pairs have few
        key = self.colours[a], self.colours[b], self.seen.wires[a][b]
        if key not in self._trip:
            self._trip[key] = self._trip_s(self.devices[a], self.devices[b])
        return self._trip[key]

    def wire_s(self, a: int, b: int) -> float:
        """Return the seconds that a message takes of the link between two devices."""
        key = self.seen.wires[a][b]
        if key not in self._wire:
            self._wire[key] = self._wire_s(self.devices[a], self.devices[b])
        return self._wire[key]

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
    after, nexts = _next_alike(kinds), _firsts(kinds)
    begun: list[tuple[Path, tuple[int, ...], Iterator[int]]] = [((), nexts, iter(nexts))]
    while begun:  # no recursion: it would be as deep as there are devices
        taken, nexts, left = begun[-1]
        i = next(left, None)
        if i is None:
            begun.pop()
            continue
        yield (*taken, i)
        nexts = _without(nexts, i, after[i])
        begun.append(((*taken, i), nexts, iter(nexts)))


def _firsts(kinds: Sequence[int]) -> tuple[int, ...]:
    """Return the first device of each kind."""
    found: dict[int, int] = {}
    for i, kind in enumerate(kinds):
        found.setdefault(kind, i)
    return tuple(found.values())


def _promising(known: _Known, most: int) -> Iterator[Path]:
    """Yield what a beam finds, and sorted ones.

    Mirror images are yielded, too: a model is not the same from its two ends.
    """
    whole = len(known.devices)
    step = max(1, -(-whole * 12 // most), whole // _LENGTHS)
    lengths = {*range(whole, 1, -step), 1}
    found = (path for paths in _beam(known) for path in paths if len(path) in lengths)
    for path in (*found, *_sorted(known, lengths)):
        yield path
        yield path[::-1]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A path that a beam extends: its sums, and the first device of each kind that is left."""

    path: Path
    sums: _PathSums
    nexts: tuple[int, ...]


def _beam(known: _Known) -> list[list[Path]]:
    """Return, for each length, the best paths of those that extend the best ones before."""
    after = _next_alike(known.kinds)
    begun = [_Begun((), _PathSums(0.0), _firsts(known.kinds))]
    found = []
    for length in range(1, len(known.devices) + 1):
        longer = [
            (known.step_of(sums, length), old.path, i, sums, old)
            for old in begun
            for i, sums in _extended(known, old)
        ]
        longer.sort(key=lambda each: each[:3])
        begun = [
            _Begun((*path, i), sums, _without(old.nexts, i, after[i]))
            for _, path, i, sums, old in longer[:_BEAM]
        ]
        found.append([each.path for each in begun[:_PER_LENGTH]])
    return found


def _extended(known: _Known, old: _Begun) -> Iterator[tuple[int, _PathSums]]:
    """Yield the devices that a path may go on to, one of each neighbourhood and way there."""
    last = old.path[-1] if old.path else None
    alike: set[tuple[int, float]] = set()
    for i in old.nexts:
        key = known.colours[i], 0.0 if last is None else known.trip_s(last, i)
        if key not in alike:
            alike.add(key)
            yield i, known.begun(i) if last is None else known.longer(old.sums, last, i)


def _next_alike(kinds: Sequence[int]) -> list[int | None]:
    """Return, for each device, the next of its kind."""
    after: list[int | None] = [None] * len(kinds)
    last: dict[int, int] = {}
    for i, kind in enumerate(kinds):
        if kind in last:
            after[last[kind]] = i
        last[kind] = i
    return after


def _without(nexts: tuple[int, ...], taken: int, after: int | None) -> tuple[int, ...]:
    """Return the first devices of each kind once one of them is taken."""
    left = [i for i in nexts if i != taken]
    return tuple(left if after is None else sorted((*left, after)))


def _sorted(known: _Known, lengths: Iterable[int]) -> Iterator[Path]:
    """Yield beginnings of the devices sorted by speed, memory and host."""
    devices, every = known.devices, range(len(known.devices))
    hosts = list(dict.fromkeys(device.host for device in devices))
    whole = [
        tuple(every),
        tuple(sorted(every, key=lambda i: (-devices[i].memory_bytes, i))),
        tuple(sorted(every, key=lambda i: (devices[i].memory_bytes, i))),
        tuple(sorted(every, key=lambda i: (hosts.index(devices[i].host), i))),
    ]
    for length in sorted(lengths, reverse=True):
        yield from (order[:length] for order in whole)
        yield from (order[::-1][:length] for order in whole[:1])
