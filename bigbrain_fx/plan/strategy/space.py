"""What was left open -> every strategy that may be planned, each once; of unlike devices few.

    numbers of replicas   all devices, as `divide` gives them to each
    tensor groups         of one replica; of several alike, the same in each
    other divisions       of few devices: each choice of disjoint sets, some devices left out

This file knows devices, and which axes pay; it prices no strategy and plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from math import gcd

from bigbrain_fx.core import Axis, Cluster, Graph
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.replicas import (
    divide,
    has_many_messages,
    likeness,
    numbers,
    numbers_of,
    only,
    replica_count,
    run_as_one,
)
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.strategy.bound import Bound
from bigbrain_fx.plan.strategy.strategy import Strategy
from bigbrain_fx.plan.tensor import FEW, Grouping, alike, groupings, shares_of
from bigbrain_fx.planning import nameless, near_first

Sets = tuple[tuple[str, ...], ...]
MEMBERS = (2, 4, 8, 16)
"""Of a group, where devices are many."""
_FINER, _LARGEST = (1, 2, 3), 12
"""How much finer than they are shares are looked at, and the largest number of one."""


def replicas_are_open(cluster: Cluster, options: Options) -> bool:
    """Whether the number of replicas is the planner's to choose."""
    return options.replicas == 0 and not (options.replica_shares or cluster.replicas)


def micro_batches_are_open(graph: Graph, cluster: Cluster, options: Options) -> bool:
    """Whether the rows of replicas' micro-batches are open."""
    if options.micro_batches or graph.static_batch or not graph.rows_apart:
        return False
    if not options.wants_replicas(cluster, trains=graph.training):
        return False
    is_one = replica_count(cluster, options) == 1 and options.all_reduce_order != "tree"
    return not is_one and not run_as_one(graph, cluster, options)


def with_micro_batches(
    strategy: Strategy, graph: Graph, cluster: Cluster, options: Options
) -> Iterator[Strategy]:
    """Yield a strategy of replicas with each number of micro-batches, ascending."""
    count = replica_count(cluster, options)
    for number in numbers_of(graph, cluster, options, count):
        yield replace(strategy, replicas=count, micro_batches=number)


def undivided(cluster: Cluster, options: Options) -> Iterator[Strategy]:
    """Yield one pipeline and each number of replicas on all devices, or those asked for."""
    members, zero = options.tensor or 1, options.zero_stage
    if not replicas_are_open(cluster, options):
        yield Strategy(replica_count(cluster, options), members, zero)
        return
    for count in numbers(cluster):
        if count == 1 or not has_many_messages(count):
            of_one = zero if options.all_reduce_order == "tree" and zero else 0
            yield Strategy(count, members, zero if count > 1 else of_one)


def replica_counts(cluster: Cluster, options: Options) -> tuple[int, ...]:
    """Return how many replicas of groups to compare: every number, or the one that is asked for."""
    if replicas_are_open(cluster, options):
        return tuple(n for n in numbers(cluster) if n > 1 and not has_many_messages(n))
    given = options.replicas or 1
    is_plain = not options.replica_shares and not cluster.replicas
    return (given,) if given > 1 and is_plain else ()


def grouped(
    cluster: Cluster, options: Options, bound: Bound, count: int, *, fits: bool
) -> Iterator[Strategy]:
    """Yield tensor groups of one replica of so many, alike in all.

    Args:
        cluster: all devices.
        options: what was asked for.
        bound: which axes pay.
        count: of replicas, which are alike.
        fits: whether anything else does: if not, all is divided that can be.
    """
    divided = divide(cluster, count) if count > 1 else (tuple(cluster.device),)
    own, most = only(cluster, divided[0]), _most(cluster, bound)
    for grouping in groupings(own, bound.speeds(), most):
        if len(cluster.devices) > 2 * MEMBERS[-1] and grouping.members not in MEMBERS:
            continue
        names = [name for group in grouping.groups for name in group]
        places = [divided[0].index(name) for name in names]
        sets = tuple(tuple(each[place] for place in places) for each in divided)
        zero = options.zero_stage if count > 1 else 0
        strategy = Strategy(count, grouping.members, zero, sets, grouping.shares)
        yield from _of_axes(strategy, grouping, bound, fits=fits)


def _most(cluster: Cluster, bound: Bound) -> int:
    usable = [axis.size for axis in bound.named if axis.flops and axis.params]
    many = len(cluster.devices) > 2 * MEMBERS[-1]
    return min(max(usable, default=1), MEMBERS[-1] if many else len(cluster.devices))


def _of_axes(
    strategy: Strategy, grouping: Grouping, bound: Bound, *, fits: bool
) -> Iterator[Strategy]:
    """Yield it with the axes that pay, or others; where nothing fits, with all that there are."""
    every = bound.axes(grouping.members)
    if not fits:
        yield from [strategy] if every else []
        return
    paying = bound.paying(grouping)
    choices = (paying, every, *_other_axes(paying, bound.named, grouping.members))
    for axes in dict.fromkeys(filter(None, choices)):
        names = () if axes == every else tuple(axis.name for axis in axes)
        yield replace(strategy, axes=names)


def _other_axes(
    own: Sequence[Axis], usable: Sequence[Axis], members: int
) -> Iterator[tuple[Axis, ...]]:
    """Yield what else could be divided: without axes of alike layers, or with such first."""
    for same in alike(own).values():
        yield tuple(axis for axis in own if axis not in same)
        yield chosen_axes([axis for axis in usable if axis not in same], members)
    for same in alike(axis for axis in usable if axis not in own).values():
        first = chosen_axes(same, members)
        busy = {place.name for axis in first for place in (*axis.params, *axis.values)}
        kept = (a for a in own if not busy & {place.name for place in (*a.params, *a.values)})
        yield (*first, *kept)


def roomier(strategy: Strategy) -> Iterator[Strategy]:
    """Yield what may fit where a strategy lacks memory: the state divided, shares more alike."""
    if strategy.replicas > 1 and not strategy.zero_stage:
        yield replace(strategy, zero_stage=1)
    whole, count = sum(strategy.shares), len(strategy.shares)
    for part in (0.75, 0.5, 0.25, 0.0) if len(set(strategy.shares)) > 1 else ():
        shares = shares_of([part * s / whole + (1 - part) / count for s in strategy.shares])
        yield replace(strategy, shares=shares)


def neighbours(strategy: Strategy, bound: Bound, options: Options) -> Iterator[Strategy]:
    """Yield a strategy of groups with one thing changed: axes of alike layers, or a member's share.

    What was asked for stays as it is.
    """
    if strategy.members == 1:
        return
    if not options.tensor_axes:
        own = [axis for axis in bound.named if axis.name in strategy.axes]
        for axes in _other_axes(own or bound.axes(strategy.members), bound.named, strategy.members):
            yield replace(strategy, axes=tuple(axis.name for axis in axes))
    for shares in _other_shares(strategy.shares) if not options.tensor_shares else ():
        yield replace(strategy, shares=shares)


def _other_shares(shares: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
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


def are_alike(graph: Graph, cluster: Cluster, options: Options, count: int) -> bool:
    """Whether so many replicas have devices alike, and as many micro-batches each."""
    divided = (only(cluster, own) for own in divide(cluster, count))
    micro, step = options.micro_batches or count, count * (graph.static_batch or 1)
    return not (graph.batch % step or micro % count) and len(set(map(likeness, divided))) == 1


# --------------------------------------------------------------------------- other divisions


def divisions(
    cluster: Cluster, options: Options, bound: Bound, members: Sequence[int]
) -> Iterator[Strategy]:
    """Yield two or more replicas on sets of few devices that `divide` does not make.

    Args:
        cluster: all devices; of many nothing is yielded.
        options: what was asked for.
        bound: how fast devices are.
        members: numbers of a tensor group's; 1: none.
    """
    if len(cluster.devices) > FEW:
        return
    speeds = bound.speeds()
    for count in members:
        for sets in _sets(cluster, count, speeds):
            if options.micro_batches is None or options.micro_batches >= len(sets):
                yield from _in_orders(cluster, options, bound, sets, count)


def _in_orders(
    cluster: Cluster, options: Options, bound: Bound, sets: Sets, members: int
) -> Iterator[Strategy]:
    """Yield these sets, with members of groups in the orders that may matter."""
    speeds = bound.speeds()
    fastest = [tuple(sorted(own, key=lambda name: -speeds[name])) for own in sets]
    orders = [_orders(cluster, own, speeds) if members > 1 else [own] for own in fastest[1:]]
    for others in product(*orders):
        found = (fastest[0], *others)
        if members == 1:
            yield Strategy(len(sets), 1, options.zero_stage, found)
            continue
        groups = [own[i : i + members] for own in found for i in range(0, len(own), members)]
        if all(_may_group(cluster, group) for group in groups):
            columns = zip(*groups, strict=True)
            shares = shares_of([sum(speeds[name] for name in column) for column in columns])
            zero = options.zero_stage
            strategy = Strategy(len(sets), members, zero, found, shares)
            yield from _of_axes(strategy, Grouping(tuple(groups), shares), bound, fits=True)


def _orders(
    cluster: Cluster, own: tuple[str, ...], speeds: Mapping[str, float]
) -> list[tuple[str, ...]]:
    """Return all orders, the fastest first: members in one place send each other gradients."""
    if not cluster.links:
        return [own]
    each = [speeds[name] for name in own]
    return [some for some in permutations(own) if [speeds[name] for name in some] == each]


def _may_group(cluster: Cluster, group: Sequence[str]) -> bool:
    own = [cluster.device[name] for name in group]
    return len({(device.host, device.threads, device.kind) for device in own}) == 1


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
