"""Few devices -> other ways to divide them among replicas, each with about the least of its step.

    1 2 2      [2 2] [1]    [2] [2]    [2 1] [2]    what `divide` makes of each number is left out
               tensor groups in each, where they were left open, too

Devices may stand still. Micro-batches go to who is done first, as if a replica's devices divided
its work freely. This file knows devices and what a model takes on each; it plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations, product

from bigbrain_fx.core import Axis, Cluster, Graph
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.replicas import by_speed, divide, likeness, numbers, only
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor import FEW, Grouping, Prices, named_axes, shares_of
from bigbrain_fx.planning import bytes_per_s, nameless, near_first

Sets = tuple[tuple[str, ...], ...]
Make = Callable[[Graph, Cluster, Source, Options], Plan]


@dataclass(frozen=True)
class Division:
    """Devices for each replica, in groups of so many.

    Attributes:
        least_s: about the least that a step takes.
    """

    sets: Sets
    members: int
    shares: tuple[int, ...]
    least_s: float

    def __str__(self) -> str:
        """Say it as a plan of as many replicas is called."""
        groups = f" of tensor groups of {self.members} devices" if self.members > 1 else ""
        return f"{len(self.sets)} replicas{groups}"


def divisions(
    graph: Graph, cluster: Cluster, source: Source, options: Options, members: Sequence[int]
) -> tuple[Division, ...]:
    """Return what `divide` makes nothing of, the most promising first; of many devices nothing.

    Args:
        graph: as captured.
        cluster: all devices.
        source: the optimizer's part.
        options: what was asked for besides.
        members: numbers of a tensor group's; 1: none.
    """
    if len(cluster.devices) > FEW:
        return ()
    known = _Known(graph, cluster, source, options)
    found = (
        each
        for count in members
        for sets in _sets(cluster, count, known.speeds)
        for each in known.all_of(sets, count)
    )
    return tuple(sorted(found, key=lambda each: each.least_s))


def of_division(
    division: Division, make: Make, graph: Graph, cluster: Cluster, source: Source, options: Options
) -> Plan:
    """Plan replicas of these devices.

    Raises:
        NoPlanError: they do not fit in memory.
        InputError: they cannot be made as asked.
    """
    shares = division.shares if division.members > 1 else ()
    count = len(division.sets)
    one = replace(options, replicas=count, tensor=division.members, tensor_shares=shares)
    own = [cluster.device[name] for names in division.sets for name in names]
    found = make(graph, replace(cluster, devices=tuple(own), replicas=division.sets), source, one)
    return replace(found, cluster=cluster)


class _Known:
    """What a model takes on each device; mutable, remembers what it worked out."""

    def __init__(self, graph: Graph, cluster: Cluster, source: Source, options: Options) -> None:
        self.graph, self.cluster, self.options = graph, cluster, options
        rows = graph.static_batch or graph.batch
        costs = estimated(graph.at(rows), cluster, source, options.estimator)
        self.prices = Prices(costs.alone or costs, cluster, graph.batch // rows)
        self.speeds = self.prices.speeds()

    def all_of(self, sets: Sets, members: int) -> Iterator[Division]:
        """Yield these sets, with members of groups in the orders that may matter."""
        micro = self.options.micro_batches
        if micro is not None and micro < len(sets):
            return
        fastest = [sorted(own, key=self._slowness) for own in sets]
        orders = [self._orders(own) if members > 1 else [tuple(own)] for own in fastest[1:]]
        for others in product(*orders):
            found = self._division((tuple(fastest[0]), *others), members)
            if found is not None:
                yield found

    def _slowness(self, name: str) -> float:
        return -self.speeds[name]

    def _orders(self, own: Sequence[str]) -> list[tuple[str, ...]]:
        """Return all orders, the fastest first: members in one place send each other gradients."""
        if not self.cluster.links:
            return [tuple(own)]
        each = [self.speeds[name] for name in own]
        every = permutations(own)
        return [some for some in every if [self.speeds[name] for name in some] == each]

    def _division(self, sets: Sets, members: int) -> Division | None:
        """Return one of these; None where no axis has so many parts, or members may not group."""
        groups = [own[i : i + members] for own in sets for i in range(0, len(own), members)]
        if members > 1 and any(not self._may_group(group) for group in groups):
            return None
        columns = zip(*groups, strict=True)
        shares = shares_of([sum(self.speeds[name] for name in column) for column in columns])
        each = [self._speed(own, members, shares) for own in sets]
        return Division(sets, members, shares, self._dealt_s(each) + self._sums_s(sets))

    def _may_group(self, group: Sequence[str]) -> bool:
        own = [self.cluster.device[name] for name in group]
        return len({(device.host, device.threads, device.kind) for device in own}) == 1

    def _speed(self, own: Sequence[str], members: int, shares: tuple[int, ...]) -> float:
        """Return how many batches a second a replica does, all of its devices busy."""
        if members == 1:
            return sum(self.speeds[name] for name in own)
        groups = tuple(tuple(own[i : i + members]) for i in range(0, len(own), members))
        grouping = Grouping(groups, shares)
        axes = self.prices.paying(chosen_axes(self._named, members), grouping)
        return 1 / self.prices.least_s(axes, grouping)

    def _dealt_s(self, speeds: Sequence[float]) -> float:
        micro = self.options.micro_batches
        if micro is None:
            return 1 / sum(speeds)
        dealt = by_speed(micro, speeds)
        return max(own / micro / speed for own, speed in zip(dealt, speeds, strict=True))

    def _sums_s(self, sets: Sets) -> float:
        """Return about what summing gradients takes: each replica's go to the others once."""
        pairs = (
            bytes_per_s(self.cluster, a, b)
            for one, other in combinations(sets, 2)
            for a in one
            for b in other
        )
        each = self._held_bytes / len(sets) / max(map(len, sets))
        return each / max(pairs)

    @cached_property
    def _held_bytes(self) -> int:
        return sum(param.spec.nbytes for param in self.graph.trained.values())

    @cached_property
    def _named(self) -> tuple[Axis, ...]:
        return named_axes(self.graph, self.options)


def _sets(cluster: Cluster, members: int, speeds: Mapping[str, float]) -> Iterator[Sets]:
    """Yield every choice of two or more disjoint sets, each of a multiple of so many devices.

    Those that are alike but for names once; not those that `divide` makes, of which each number of
    replicas is planned besides, and of groups where all replicas are alike.
    """
    seen = set()
    for sets in _disjoint(tuple(device.name for device in near_first(cluster)), members):
        if len(sets) < 2 or _is_planned_besides(cluster, sets, members):
            continue
        key = sets if cluster.links else _kinds(cluster, sets, speeds)
        if key not in seen:
            seen.add(key)
            yield sets


def _is_planned_besides(cluster: Cluster, sets: Sets, members: int) -> bool:
    count = len(sets)
    if count not in numbers(cluster):
        return False
    if set(map(frozenset, sets)) != set(map(frozenset, divide(cluster, count))):
        return False
    return members == 1 or len({likeness(only(cluster, own)) for own in sets}) == 1


def _kinds(cluster: Cluster, sets: Sets, speeds: Mapping[str, float]) -> tuple[object, ...]:
    def kind(name: str) -> tuple[object, ...]:
        device = cluster.device[name]
        return nameless(device), device.host, speeds[name]

    return tuple(sorted((tuple(sorted(map(kind, own), key=repr)) for own in sets), key=repr))


def _disjoint(names: tuple[str, ...], members: int) -> Iterator[Sets]:
    """Yield every choice of disjoint sets, each of a multiple of so many; none, too."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    yield from _disjoint(rest, members)
    for size in range(members, len(names) + 1, members):
        for others in combinations(rest, size - 1):
            left = tuple(name for name in rest if name not in others)
            yield from (((first, *others), *more) for more in _disjoint(left, members))
