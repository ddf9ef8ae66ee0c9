"""A grouping -> the axes, shares and order of members with which its ops take least, and how long.

    axes that send least ──leave out, add, exchange──▶ shares ──move one──▶ members ──swap──▶

The ops of each group are added up as plans do, exchanges among them. Nothing is cut or simulated:
what is sent between groups, and where they wait for each other, a plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import gcd
from typing import TypeVar

from bigbrain_fx.core import Axis, Cluster, Costs, Graph, TensorParallel
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options, Source
from bigbrain_fx.plan.search import Effort
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor.choices import alike
from bigbrain_fx.plan.tensor.groupings import Grouping
from bigbrain_fx.plan.tensor.make import GroupMaker

_T = TypeVar("_T")
OPS: dict[Effort, int] = {"fast": 1_000, "normal": 3_000, "high": 60_000}
"""So many ops may be weighed, in all looks at groups of one search; half a millisecond each."""
_FINER, _LARGEST = (1, 2, 3), 12
"""How much finer than they are shares are looked at, and the largest number of one."""


@dataclass(frozen=True)
class Divided:
    """What a grouping divides, and what its step takes.

    Attributes:
        least_s: about the least: all groups busy to its end.
        about_s: of a chain of groups, all equally busy while it is full.
    """

    grouping: Grouping
    axes: tuple[Axis, ...]
    least_s: float
    about_s: float

    def tensor(self) -> TensorParallel:
        """Return it as a placement has it."""
        groups, shares = self.grouping.groups, self.grouping.shares
        return TensorParallel(groups, shares, self.axes, scatters=True)


@dataclass
class Weigher:
    """Adds up what ops take: mutable, counts its looks.

    Attributes:
        usable: axes that may be divided, priced.
        left: looks that are left, of this search.
    """

    graph: Graph
    cluster: Cluster
    source: Source
    options: Options
    usable: Sequence[Axis]
    left: int
    _known: dict[object, tuple[float, float]] = field(default_factory=dict)

    def best(self, grouping: Grouping, starts: Sequence[tuple[Axis, ...]], most: int) -> Divided:
        """Return the best that is found in so many looks; the first look is for nothing.

        Args:
            grouping: whose devices these are.
            starts: axes to begin with, one choice at least.
            most: looks.
        """
        end = max(0, self.left - most)
        firsts = dict.fromkeys(filter(None, starts))
        found = min((self._weighed(grouping, axes) for axes in firsts), key=_seconds)
        for _ in range(2):  # other shares may suit other axes
            for others in (self._other_axes, self._other_shares, self._other_orders):
                found = self._climbed(found, others, end)
        return found

    def _climbed(
        self, found: Divided, others: Callable[[Divided], Iterator[Divided]], end: int
    ) -> Divided:
        """Go to what is better, the first that is met, until nothing is or the looks are used."""
        is_better = True
        while is_better and self.left > end:
            is_better = False
            for other in others(found):
                if other.about_s < found.about_s * (1 - 1e-9):
                    found, is_better = other, True
                if is_better or self.left <= end:
                    break
        return found

    def _weighed(self, grouping: Grouping, axes: tuple[Axis, ...]) -> Divided:
        key = grouping, tuple(axis.name for axis in axes)
        if key not in self._known:
            self.left -= 1
            try:
                self._known[key] = self._steps_s(Divided(grouping, axes, 0.0, 0.0))
            except InputError:  # a part is too small to be exchanged, say
                self._known[key] = float("inf"), float("inf")
        return Divided(grouping, axes, *self._known[key])

    def _steps_s(self, divided: Divided) -> tuple[float, float]:
        """Return what a step takes of groups that are busy to its end, and of a chain of them."""
        about = self.graph, self.cluster, self.source, self.options
        maker = GroupMaker(*about, divided.tensor())
        fewest = self.graph.batch // (self.graph.static_batch or self.graph.batch)
        micro = self.options.micro_batches or fewest
        each = maker.estimated_of_members(self.graph.batch // micro)
        graphs = maker.sharded.members
        speeds = []
        for group in divided.grouping.groups:
            ops = each[0].ops[group[0]].values()
            one_s = sum(cost.forward_s + cost.backward_s for cost in ops)
            updates_s = map(_update_s, graphs, each, group)
            speeds.append(1 / max(micro * one_s + max(updates_s), 1e-12))
        return 1 / sum(speeds), chain_s(speeds, self.options.micro_batches)

    def _other_axes(self, divided: Divided) -> Iterator[Divided]:
        for axes in other_axes(divided.axes, self.usable, divided.grouping.members):
            yield self._weighed(divided.grouping, axes)

    def _other_shares(self, divided: Divided) -> Iterator[Divided]:
        for shares in other_shares(divided.grouping.shares):
            yield self._weighed(replace(divided.grouping, shares=shares), divided.axes)

    def _other_orders(self, divided: Divided) -> Iterator[Divided]:
        """Yield it with two members changing places, each with its share."""
        grouping, count = divided.grouping, divided.grouping.members
        for i in range(count):
            for j in range(i + 1, count):
                groups = tuple(_swapped(group, i, j) for group in grouping.groups)
                other = Grouping(groups, _swapped(grouping.shares, i, j))
                yield self._weighed(other, divided.axes)


def _update_s(graph: Graph, costs: Costs, device: str) -> float:
    """Return what a member's optimizer takes for all that it holds."""
    if not graph.training:
        return 0.0
    sizes = [param.spec.nbytes for param in graph.trained.values()]
    return costs.optimizer_s(device, len(sizes), sum(sizes))


def chain_s(speeds: Iterable[float], micro_batches: int | None) -> float:
    """Return about a step of a chain on some of these, the fastest first, which take a part each.

    Args:
        speeds: steps a second, of all the work.
        micro_batches: None: so many that the chain is full all the time.
    """
    together, found = 0.0, []
    for others, speed in enumerate(sorted(speeds, reverse=True)):
        together += speed
        filled = 1 + (others / micro_batches if micro_batches else 0.0)
        found.append(filled / together)
    return min(found)


def _seconds(divided: Divided) -> tuple[float, float]:
    return divided.about_s, divided.least_s


def other_axes(
    own: Sequence[Axis], usable: Sequence[Axis], members: int
) -> Iterator[tuple[Axis, ...]]:
    """Yield what else could be divided, each once.

    Axes of alike layers go together: without them, with what they met instead, or with them too.
    """
    found: list[tuple[Axis, ...]] = []
    for same in alike(own).values():
        found.append(tuple(axis for axis in own if axis not in same))
        found.append(chosen_axes([axis for axis in usable if axis not in same], members))
    for same in alike(axis for axis in usable if axis not in own).values():
        found.append(chosen_axes([*own, *same], members))
        found.append(_before(same, own, members))
    for axes in dict.fromkeys(found):
        if axes and set(axes) != set(own):
            yield axes


def _before(first: Sequence[Axis], own: Sequence[Axis], members: int) -> tuple[Axis, ...]:
    """Return these axes, and those of one's own that do not meet them."""
    taken = chosen_axes(first, members)
    busy = {place.name for axis in taken for place in (*axis.params, *axis.values)}
    kept = (a for a in own if not busy & {place.name for place in (*a.params, *a.values)})
    return (*taken, *kept)


def other_shares(shares: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield shares with a little more or less for one member or two, in the smallest numbers."""
    found = {shares: None}
    ones = [((member, more),) for member in range(len(shares)) for more in (1, -1)]
    for moves in (*ones, *((*a, *b) for a, b in combinations(ones, 2) if a[0][0] != b[0][0])):
        for times in _FINER:
            other = [times * share for share in shares]
            for member, more in moves:
                other[member] += more
            whole = gcd(*other)
            if min(other) > 0 and max(other) // whole <= _LARGEST:
                found[tuple(share // whole for share in other)] = None
    return (other for other in found if other != shares)


def _swapped(entries: tuple[_T, ...], i: int, j: int) -> tuple[_T, ...]:
    found = list(entries)
    found[i], found[j] = found[j], found[i]
    return tuple(found)
