"""Devices -> replicas of any sets of them, some devices left idle, and about how long each takes.

    a b c, 2 micro-batches     [a] [b]   [a b] [c]   [a] [b] [c]   ...

A partition is yielded once: devices that could change places count as identical. The order and the
names of devices have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replicas import Group, by_speed, divide, has_many_messages
from bigbrain_fx.plan.strategy.space import replicas_are_open
from bigbrain_fx.plan.strategy.strategy import Bound, Strategy
from bigbrain_fx.planning import interchangeable, near_first

Sets = tuple[Group, ...]
FEW = 6
"""Devices of which every partition is looked at: 876 of six that are all different."""
MOST = 256
"""Devices whose numbers of replicas are all looked at."""


def has_partitions(cluster: Cluster, options: Options) -> bool:
    """Whether replicas may be of any sets of the devices, as far as options go."""
    is_open = replicas_are_open(cluster, options) and options.tensor in (None, 0, 1)
    return is_open and 2 < len(cluster.devices) <= MOST


def partitions(cluster: Cluster, known: Iterable[Sets] = ()) -> Iterator[Sets]:
    """Yield disjoint sets of devices, two at least, each partition once; of many devices few.

    Args:
        cluster: all devices.
        known: partitions that are left out.
    """
    if len(cluster.devices) > FEW:
        yield from _of_near_ones(cluster)
        return
    kind = {name: i for i, names in enumerate(interchangeable(cluster)) for name in names}
    seen = {_key(sets, kind) for sets in known}
    for sets in _disjoint(tuple(device.name for device in near_first(cluster))):
        key = _key(sets, kind)
        if len(sets) > 1 and key not in seen:
            seen.add(key)
            yield sets


def _key(sets: Sets, kind: Mapping[str, int]) -> object:
    """Return the kinds of each set's devices: what partitions have in common that are alike."""
    return tuple(sorted(tuple(sorted(map(kind.__getitem__, own))) for own in sets))


def _disjoint(names: Group) -> Iterator[Sets]:
    """Yield every choice of disjoint sets, each in the order of the names."""
    if not names:
        yield ()
        return
    *before, last = names
    for sets in _disjoint(tuple(before)):
        yield sets
        for i, own in enumerate(sets):
            yield (*sets[:i], (*own, last), *sets[i + 1 :])
        yield (*sets, (last,))


def _of_near_ones(cluster: Cluster) -> Iterator[Sets]:
    """Yield so many replicas as do not divide the devices, of neighbours.

    All have as many devices and the slowest devices are idle, or some have one device more.
    """
    near = [device.name for device in near_first(cluster)]
    fastest = sorted(near, key=lambda name: -cluster.device[name].flops_per_s)
    for count in range(2, len(near)):
        size, more = divmod(len(near), count)
        if more and not has_many_messages(count):
            used = set(fastest[: count * size])
            yield _cut([name for name in near if name in used], [size] * count)
            yield _cut(near, [size + 1] * more + [size] * (count - more))


def _cut(names: Sequence[str], sizes: Sequence[int]) -> Sets:
    ends = [0, *accumulate(sizes)]
    return tuple(tuple(names[a:b]) for a, b in pairwise(ends))


@dataclass
class SetPrices:
    """About how long sets of devices take: mutable, remembers each set's."""

    bound: Bound
    cluster: Cluster
    _known: dict[tuple[Group, int], tuple[float, float, float]] = field(default_factory=dict)

    def about_s(self, strategy: Strategy, most_s: float = float("inf")) -> float:
        """Return about the seconds of a step; infinity where replicas alone take the most."""
        sets = strategy.sets or divide(self.cluster, strategy.replicas)
        rows = self.bound.rows(strategy)
        try:
            alone_s = min((self._of_rows(sets, each) for each in rows), default=float("inf"))
            return alone_s + self.bound.sums_s(sets) if alone_s < most_s else float("inf")
        except InputError:  # there is no such number of rows
            return float("inf")

    def _of_rows(self, sets: Sets, rows: int) -> float:
        """Return about the seconds of the slowest replica, in micro-batches of so many rows."""
        micro = self.bound.graph.batch // rows
        if micro < len(sets):
            return float("inf")
        each = micro // len(sets)
        dealt = by_speed(micro, [each / max(self.alone_s(own, rows, each), 1e-12) for own in sets])
        return max(self.alone_s(own, rows, n) for own, n in zip(sets, dealt, strict=True))

    def alone_s(self, own: Group, rows: int, micro: int) -> float:
        """Return about the seconds of one replica, each of its devices a stage."""
        if (own, rows) not in self._known:
            self._known[own, rows] = self._paces(own, rows)
        pace_s, sent_s, slowest_s = self._known[own, rows]
        return (micro + len(own) - 1) * pace_s + sent_s + (micro - 1) * max(0.0, slowest_s - pace_s)

    def _paces(self, own: Group, rows: int) -> tuple[float, float, float]:
        """Return a stage's seconds, those of a micro-batch's messages, and of the slowest link."""
        speeds = self.bound.rates(rows)
        others = len(own) - 1
        pace_s = (1 + self.bound.largest * others / 2) / sum(speeds[name] for name in own)
        wires = [self._wire(a, b, rows) for a, b in pairwise(self._walk(own))]
        sent_s = 2 * sum(latency_s + busy_s for latency_s, busy_s in wires)
        return pace_s, sent_s, max((busy_s for _, busy_s in wires), default=0.0)

    def _walk(self, own: Group) -> Sequence[str]:
        """Return the devices such that each is near to the one before it, from the best start."""
        if len(self.cluster.devices) > FEW:
            return own  # neighbours already
        walks = [self._walk_from(first, own) for first in own]
        return min(walks, key=lambda walk: sum(self._sent_s(a, b) for a, b in pairwise(walk)))

    def _walk_from(self, first: str, own: Group) -> list[str]:
        found, left = [first], [name for name in own if name != first]
        while left:
            nearest = min(left, key=lambda name: self._sent_s(found[-1], name))
            left.remove(nearest)
            found.append(nearest)
        return found

    def _sent_s(self, a: str, b: str) -> float:
        """Return the seconds of a message of one row."""
        return sum(self._wire(a, b, 1))

    def _wire(self, a: str, b: str, rows: int) -> tuple[float, float]:
        """Return the latency of a link, and how long a message of so many rows occupies it."""
        link = self.cluster.wire(a, b)
        return link.latency_s, link.wire_s(self._row_bytes * rows)

    @cached_property
    def _row_bytes(self) -> int:
        return self.bound.crossing_bytes // self.bound.graph.batch
