"""Devices -> replicas of any sets of them, some devices left idle, and about how long each takes.

    a b c, 2 micro-batches     [a] [b]   [a b] [c]   [a] [b] [c]   ...

A partition is yielded once: devices that could change places count as identical. The order and the
names of devices have no effect.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import gcd

from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replicas import Group, by_speed, divide, has_many_messages
from bigbrain_fx.plan.strategy.space import kinds_of, replicas_are_open
from bigbrain_fx.plan.strategy.strategy import Bound, Strategy
from bigbrain_fx.planning import Crowds, interchangeable, nameless, near_first

Sets = tuple[Group, ...]
_Stage = tuple[float, float]
"""Seconds of the stages before, and its own of a micro-batch."""
_Crowded = tuple[str, float]
"""A device, and the contention on its host: see `Crowds`."""
FEW = 6
"""Devices of which every partition is looked at: 876 of six that are all different."""
DEALT, HALVINGS = 2, 16
"""Times that micro-batches are dealt to replicas, and of the seconds in which one is done."""
MOST, MOST_KINDS = 256, 6
"""Devices whose numbers of replicas are all looked at, and kinds that may have replicas of their
own."""


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
    are_few = len(cluster.devices) <= FEW
    alike = interchangeable(cluster) if are_few else [[name] for name in cluster.device]
    kind = {name: i for i, names in enumerate(alike) for name in names}
    seen = {_key(sets, kind) for sets in known}
    for sets in _disjoint(near_first(cluster)) if are_few else _of_many(cluster):
        key = _key(sets, kind)
        if len(sets) > 1 and key not in seen:
            seen.add(key)
            yield sets


def _key(sets: Sets, kind: Mapping[str, int]) -> object:
    """Return the kinds of each set's devices: what partitions have in common that are alike."""
    return tuple(sorted(tuple(sorted(map(kind.__getitem__, own))) for own in sets))


def _disjoint(devices: Sequence[Device]) -> Iterator[Sets]:
    """Yield every choice of disjoint sets, each in the order of the devices."""
    if not devices:
        yield ()
        return
    *before, last = devices
    for sets in _disjoint(before):
        yield sets
        for i, own in enumerate(sets):
            yield (*sets[:i], (*own, last.name), *sets[i + 1 :])
        yield (*sets, (last.name,))


def _of_many(cluster: Cluster) -> Iterator[Sets]:
    """Yield replicas of neighbours, and of one kind of device each, as sums can be sent."""
    for sets in (*_of_near_ones(cluster), *_of_kinds(cluster)):
        if not has_many_messages(len(sets)):
            yield sets


def _of_near_ones(cluster: Cluster) -> Iterator[Sets]:
    """Yield so many replicas as do not divide the devices, of neighbours.

    All have as many devices and the slowest devices are idle, or some have one device more.
    """
    near = [device.name for device in near_first(cluster)]
    fastest = sorted(near, key=lambda name: -cluster.device[name].flops_per_s)
    for count in range(2, len(near)):
        size, more = divmod(len(near), count)
        if more:
            used = set(fastest[: count * size])
            yield _cut([name for name in near if name in used], [size] * count)
            yield _cut(near, [size + 1] * more + [size] * (count - more))


def _of_kinds(cluster: Cluster) -> Iterator[Sets]:
    """Yield replicas of one kind of device each, as large for a card in every zone.

    A kind may be left out: devices behind slow links, say.
    """
    kinds = kinds_of(cluster)
    if not 1 < len(kinds) <= MOST_KINDS:
        return
    for taken in product((True, False), repeat=len(kinds)):
        chosen = [own for own, is_taken in zip(kinds, taken, strict=True) if is_taken]
        cards = _cards(cluster, chosen)
        sizes = ([n for n in range(1, most + 1) if most % n == 0] for most in cards.values())
        for each in product(*sizes):
            size = dict(zip(cards, each, strict=True))
            lengths = ((own, size[nameless(cluster.device[own[0]])]) for own in chosen)
            yield tuple(own for names, n in lengths for own in _cut(names, [n] * (len(names) // n)))


def _cards(cluster: Cluster, kinds: Sequence[Group]) -> dict[object, int]:
    """Return what divides the numbers of all kinds of each card."""
    found: dict[object, int] = {}
    for own in kinds:
        card = nameless(cluster.device[own[0]])
        found[card] = gcd(found.get(card, 0), len(own))
    return found


def _cut(names: Sequence[str], sizes: Sequence[int]) -> Sets:
    ends = [0, *accumulate(sizes)]
    return tuple(tuple(names[a:b]) for a, b in pairwise(ends))


def _stages(untils: Sequence[Sequence[float]], micro: int, most_s: float) -> list[_Stage]:
    """Return the stages of a line that end in time, each as long as it may be; none: ops are left.

    Args:
        untils: of each device, the seconds of all ops before each place.
        micro: micro-batches.
        most_s: within which the last is done.
    """
    first, head_s, found = 0, 0.0, []
    for until in untils:
        after = bisect_right(until, until[first] + (most_s - head_s) / micro) - 1
        found.append((head_s, until[after] - until[first]))
        head_s, first = head_s + found[-1][1], after
    return found if first == len(untils[0]) - 1 else []


@dataclass
class SetPrices:
    """About how long sets of devices take: mutable, remembers each set's."""

    bound: Bound
    cluster: Cluster
    _known: dict[object, _Stage] = field(default_factory=dict)

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
        micro, used = self.bound.graph.batch // rows, {name for own in sets for name in own}
        if micro < len(sets):
            return float("inf")
        level = {name: self._crowds.level(name, used) for name in used if self._are_few}
        dealt, alone_s = (micro // len(sets),) * len(sets), float("inf")
        for _ in range(DEALT):
            each = zip(sets, dealt, strict=True)
            every = [self._cut([(d, level.get(d, 0.0)) for d in own], rows, n) for own, n in each]
            heads, paces = zip(*every, strict=True)
            dealt = by_speed(micro, [1 / max(pace_s, 1e-12) for pace_s in paces], heads)
            done = zip(heads, paces, dealt, strict=True)
            alone_s = min(alone_s, max(head_s + n * pace_s for head_s, pace_s, n in done))
        return alone_s

    def _cut(self, own: Sequence[_Crowded], rows: int, micro: int) -> _Stage:
        """Return about what one replica takes before, and of each of so many micro-batches.

        Each device is a stage. Of a micro-batch it is the slowest, or the slowest link's message.
        """
        key = tuple(own), rows, micro if self._are_few else 0
        if key not in self._known:
            level = dict(own)
            walk = self._walk(tuple(level))
            wires = [self._wire(a, b, rows) for a, b in pairwise(walk)]
            sent_s = 2 * sum(latency_s + busy_s for latency_s, busy_s in wires)
            head_s, pace_s = self._slowest([(d, level[d]) for d in walk], rows, micro)
            most_s = max((busy_s for _, busy_s in wires), default=0.0)
            self._known[key] = head_s + sent_s + min(0.0, pace_s - most_s), max(pace_s, most_s)
        return self._known[key]

    def _slowest(self, line: Sequence[_Crowded], rows: int, micro: int) -> _Stage:
        """Return the stage of a line that is done last where that is soonest; of many about."""
        if not self._are_few:
            others, rates = len(line) - 1, self.bound.rates(rows)
            pace_s = (1 + self.bound.largest * others / 2) / sum(rates[name] for name, _ in line)
            return others * pace_s, pace_s
        untils = [self.bound.until_s(name, rows, level) for name, level in line]
        least_s = 1 / sum(1 / max(until[-1], 1e-12) for until in untils)
        low_s, high_s = micro * least_s, micro * max(until[-1] for until in untils)
        best: list[_Stage] = []
        for _ in range(HALVINGS):
            middle_s = (low_s + high_s) / 2
            ways = (_stages(way, micro, middle_s) for way in (untils, untils[::-1]))
            found = next(filter(None, ways), [])
            best, low_s, high_s = (found, low_s, middle_s) if found else (best, middle_s, high_s)
        return max(best, key=lambda each: each[0] + micro * each[1], default=(0.0, high_s / micro))

    @cached_property
    def _crowds(self) -> Crowds:
        return Crowds(self.cluster)

    @property
    def _are_few(self) -> bool:
        return len(self.cluster.devices) <= FEW

    def _walk(self, own: Group) -> Sequence[str]:
        """Return the devices such that each is near to the one before it, from the best start."""
        if not self._are_few:
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
