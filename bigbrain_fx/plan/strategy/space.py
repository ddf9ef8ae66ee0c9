"""What was left open -> every strategy that may be planned, each once; of unlike devices few.

    numbers of replicas   all devices, as `divide` gives them to each
    unlike replicas       of one kind of device each, or without the devices of some kinds
    tensor groups         of one replica; of several alike, the same in each

This file knows devices, and which axes pay; it prices no strategy and plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd

from bigbrain_fx.core import Axis, Cluster, Graph
from bigbrain_fx.plan.device_choices import Names, kinds_of
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
from bigbrain_fx.plan.shard import chosen_axes, table_axes
from bigbrain_fx.plan.strategy.bound import Bound
from bigbrain_fx.plan.strategy.strategy import Strategy
from bigbrain_fx.plan.tensor import Grouping, alike, groupings, shares_of
from bigbrain_fx.planning import nameless

Sets = tuple[tuple[str, ...], ...]
MEMBERS = (2, 4, 8, 16)
"""Of a group, where devices are many."""
MOST_KINDS, MOST_DEVICES = 6, 256
"""Kinds, and devices, of which each kind may have replicas of its own."""


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


def unlike_replicas(cluster: Cluster, options: Options) -> Iterator[Strategy]:
    """Yield replicas of one kind of device each, as large for a card in every zone.

    A kind may be left out: devices behind slow links, say. All devices of one kind are `undivided`.
    """
    kinds = kinds_of(cluster)
    is_open = replicas_are_open(cluster, options) and options.tensor in (None, 1)
    if not is_open or len(cluster.devices) > MOST_DEVICES or not 1 < len(kinds) <= MOST_KINDS:
        return
    for taken in product((True, False), repeat=len(kinds)):
        chosen = [own for own, is_taken in zip(kinds, taken, strict=True) if is_taken]
        cards = _cards(cluster, chosen)
        if all(taken) and len(cards) == 1:
            continue
        sizes = ([n for n in range(1, most + 1) if most % n == 0] for most in cards.values())
        for each in product(*sizes):
            sets = _cut(cluster, chosen, dict(zip(cards, each, strict=True)))
            if len(sets) > 1 and not has_many_messages(len(sets)):
                yield Strategy(len(sets), 1, options.zero_stage, sets)


def _cards(cluster: Cluster, kinds: Sequence[Names]) -> dict[object, int]:
    """Return what divides the numbers of all kinds of each card."""
    found: dict[object, int] = {}
    for own in kinds:
        card = nameless(cluster.device[own[0]])
        found[card] = gcd(found.get(card, 0), len(own))
    return found


def _cut(cluster: Cluster, kinds: Sequence[Names], size: dict[object, int]) -> Sets:
    """Return the devices of each replica: of a card as many as its size says."""
    sizes = [size[nameless(cluster.device[own[0]])] for own in kinds]
    return tuple(
        own[i : i + n] for own, n in zip(kinds, sizes, strict=True) for i in range(0, len(own), n)
    )


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
    """Yield it with the axes that pay, or others; where nothing fits, with all, and tables, too."""
    every = bound.axes(grouping.members)
    if not fits:
        tables = table_axes(bound.named, every, grouping.members)
        yield from [strategy] if every else []
        yield from [_with(strategy, (*every, *tables), every)] if tables else []
        return
    paying = bound.paying(grouping)
    choices = (paying, every, *_other_axes(paying, bound.named, grouping.members))
    for axes in dict.fromkeys(filter(None, choices)):
        yield _with(strategy, axes, every)


def _with(strategy: Strategy, axes: Sequence[Axis], every: Sequence[Axis]) -> Strategy:
    names = () if axes == every else tuple(axis.name for axis in axes)
    return replace(strategy, axes=names)


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


def are_alike(graph: Graph, cluster: Cluster, options: Options, count: int) -> bool:
    """Whether so many replicas have devices alike, and as many micro-batches each.

    Their links may be unlike: shares of a group go by its devices alone.
    """
    divided = (only(cluster, own) for own in divide(cluster, count))
    micro, step = options.micro_batches or count, count * (graph.static_batch or 1)
    return (
        not (graph.batch % step or micro % count)
        and len({likeness(own)[0] for own in divided}) == 1
    )
