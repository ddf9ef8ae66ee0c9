"""Open choices -> every strategy that may be planned, each once; of heterogeneous devices few.

    numbers of replicas   all devices, as `divide` gives them to each
    tensor groups         of one replica; of several identical ones, the same in each

This file knows devices, and which axes pay; it prices no strategy and plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.fastest import counted_s, is_stopped
from bigbrain_fx.plan.nouns import Case, Options, Plan
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
from bigbrain_fx.plan.strategy.strategy import Bound, Priced, Strategy
from bigbrain_fx.planning import nameless, near_first

# ------------------------------------------------------------------------------------------------
# Cluster -> the sets of devices that one may rent, each once: of devices alike only how many.
#
#   2 of card A in zone eu, 1 of card B in zone us   ->   A, AA, B, AB, AAB
#
# Devices of one kind are taken host by host, so that few hosts are used.


Names = tuple[str, ...]
MOST = 4_096
"""Sets that are looked at; of clusters with more, few counts of each kind."""


def device_choices(cluster: Cluster) -> list[Names]:
    """Return every set of devices that may be worth renting, in the cluster's order.

    If the cluster file names replicas, all devices are the only set.
    """
    every = tuple(device.name for device in cluster.devices)
    if cluster.replicas:
        return [every]
    kinds = kinds_of(cluster)
    place = {name: i for i, name in enumerate(every)}
    found = []
    for counts in product(*_counts(kinds)):
        taken = [n for names, count in zip(kinds, counts, strict=True) for n in names[:count]]
        if taken:
            found.append(tuple(sorted(taken, key=place.__getitem__)))
    return found


def kinds_of(cluster: Cluster) -> list[Names]:
    """Return the devices of each zone, card and price, those of one host together."""
    kinds: dict[object, list[str]] = {}
    nics = {host.name: (host.nic_bytes_per_s, host.memory_bytes_per_s) for host in cluster.hosts}
    for device in near_first(cluster):
        zone, price = cluster.zone.get(device.name), cluster.price.get(device.name)
        key = zone, price, nics.get(device.host), nameless(device)
        kinds.setdefault(key, []).append(device.name)
    host = {device.name: device.host for device in cluster.devices}
    return [_by_host(names, host) for names in kinds.values()]


def _by_host(names: Sequence[str], host: dict[str, str]) -> Names:
    """Return names with the fullest host first, and those of a host together."""
    on: dict[str, list[str]] = {}
    for name in names:
        on.setdefault(host[name], []).append(name)
    return tuple(name for own in sorted(on.values(), key=len, reverse=True) for name in own)


def _counts(kinds: Sequence[Names]) -> list[list[int]]:
    """Return how many of each kind to take: any number, powers of two, or all and none."""
    sizes = [len(names) for names in kinds]
    every = [list(range(size + 1)) for size in sizes]
    powers = [sorted({0, size, *(2**n for n in range(size.bit_length()))}) for size in sizes]
    for found in (every, powers):
        if prod(map(len, found)) <= MOST:
            return found
    return [[0, size] for size in sizes]


# ------------------------------------------------------------------------------------------------
# Numbers of micro-batches -> the plan of the best: from the most promising, up and then down.
#
#   about_s   12.9  11.9 [11.7] 12.6     planned: the third, the fourth, which is slower, the second
#
# A step takes longer the further a number is from the best one: of fewer a pipeline fills late,
# of more each op is started more often. So neighbours are planned only while they are faster. What
# lacks memory by its bound is planned only where nothing else is there.


def fastest_number(
    priced: Sequence[Priced],
    make: Callable[[int | None], Plan],
    may_be_faster: Callable[[float], bool],
) -> Plan:
    """Return the fastest plan of the numbers of micro-batches of one strategy.

    Args:
        priced: the strategy with each number, ascending; one at least.
        make: plans a number; None: as the search of a pipeline finds it.
        may_be_faster: whether a step of at least so many seconds is worth a plan.

    Raises:
        BigBrainError: no number makes a plan; the first one's.
    """
    fitting = [each for each in priced if not each.lacks] or priced[-1:]
    start = min(range(len(fitting)), key=lambda i: fitting[i].about_s)
    climb = _Climb(make, may_be_faster)
    climb.along(fitting[start:])
    climb.along(fitting[:start][::-1])
    if climb.best is None:
        assert climb.failure is not None
        raise climb.failure
    return climb.best


@dataclass
class _Climb:
    """Plans so far: mutable, used once."""

    make: Callable[[int | None], Plan]
    may_be_faster: Callable[[float], bool]
    best: Plan | None = None
    failure: BigBrainError | None = field(default=None)

    def along(self, numbers: Sequence[Priced]) -> None:
        """Plan numbers as long as each is faster than the best so far, or there is none."""
        for each in numbers:
            if self.best is not None and (is_stopped() or not self._is_promising(each)):
                return
            if not self._is_faster(each.strategy.micro_batches):
                return

    def _is_promising(self, each: Priced) -> bool:
        assert self.best is not None
        return each.least_s < counted_s(self.best) and self.may_be_faster(each.least_s)

    def _is_faster(self, number: int | None) -> bool:
        """Plan one; whether those beyond it are worth a plan."""
        try:
            plan = self.make(number)
        except (NoPlanError, InputError) as error:
            self.failure = self.failure or error
            return self.best is None
        if self.best is not None and counted_s(plan) >= counted_s(self.best):
            return False
        self.best = plan
        return True


# ------------------------------------------------------------------------------------------------
# What was left open -> every strategy that may be planned, each once; of unlike devices few.


MEMBERS = (2, 4, 8, 16)
"""Of a group, where devices are many."""


def replicas_are_open(cluster: Cluster, options: Options) -> bool:
    """Whether the number of replicas is the planner's to choose."""
    return options.replicas == 0 and not (options.replica_shares or cluster.replicas)


def micro_batches_are_open(case: Case) -> bool:
    """Whether the rows of replicas' micro-batches are open."""
    graph, options = case.graph, case.options
    if options.micro_batches or graph.static_batch or not graph.rows_apart:
        return False
    if not case.wants_replicas:
        return False
    is_one = replica_count(case.cluster, options) == 1 and options.all_reduce_order != "tree"
    return not is_one and not run_as_one(case)


def with_micro_batches(strategy: Strategy, case: Case) -> Iterator[Strategy]:
    """Yield a strategy of replicas with each number of micro-batches, ascending."""
    count = replica_count(case.cluster, case.options)
    for number in numbers_of(case, count):
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


def grouped(cluster: Cluster, options: Options, bound: Bound, count: int) -> Iterator[Strategy]:
    """Yield tensor groups of every size in one of so many replicas, the same in all.

    Args:
        cluster: all devices.
        options: what was asked for.
        bound: has the axes that groups may divide.
        count: of replicas, which are identical.
    """
    many = len(cluster.devices) > 2 * MEMBERS[-1]
    longest = max((axis.size for axis in bound.named if axis.flops and axis.params), default=1)
    zero = options.zero_stage if count > 1 else 0
    for members in MEMBERS if many else range(2, len(cluster.devices) // count + 1):
        sizes = map(len, divide(cluster, count, members))
        if members <= longest and not any(size % members for size in sizes):
            yield Strategy(count, members, zero)


def are_alike(case: Case, count: int) -> bool:
    """Whether so many replicas have identical devices, and as many micro-batches each.

    Their links may differ: shares of a group go by its devices alone.
    """
    graph = case.graph
    divided = (only(case.cluster, own) for own in divide(case.cluster, count))
    micro, step = case.options.micro_batches or count, count * (graph.static_batch or 1)
    return (
        not (graph.batch % step or micro % count)
        and len({likeness(own)[0] for own in divided}) == 1
    )
