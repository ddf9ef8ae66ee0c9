"""Many devices -> numbers of replicas and members worth planning, in the order of a closed form.

    step = (micro-batches of a replica + its stages - 1) x pace + sums of gradients

The pace is a replica's work of one micro-batch at the speed of all its devices, and half of the
largest op, which no cut divides. Weights, gradients and the optimizer's state must fit beside each
other. It plans nothing: a plan for thousands of devices takes half a minute; this says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bigbrain_fx.core import Axis, Cluster, Exchange, Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.memory_check import tensor_bytes
from bigbrain_fx.plan.nouns import Options, Source
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.replicas import MOST_TRIED, has_many_messages, numbers, only
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor import Grouping, Prices, named_axes, neighbours
from bigbrain_fx.planning import bytes_per_s, nameless

ROWS = (1, 2, 4, 8)
"""Of a micro-batch; larger ones only fill a pipeline later."""
GRADIENTS = 2.0
"""Tensors of a parameter's size that its gradients take while they are added up."""
ROOM = 0.85
"""Of a device's memory for tensors that weights and what belongs to them may take: the rest is for
activations and messages."""
_MEMBERS = (2, 4, 8, 16)


def is_wide(cluster: Cluster) -> bool:
    """Whether these are more devices than every number of replicas can be planned for."""
    return len(cluster.devices) > MOST_TRIED


@dataclass(frozen=True)
class Level:
    """A number of replicas, of members and of shares of the optimizer's state.

    Attributes:
        about_s: a step, by the closed form.
        fits: whether weights, gradients and state do.
    """

    options: Options
    about_s: float
    fits: bool


def levels(
    graph: Graph,
    cluster: Cluster,
    source: Source,
    options: Options,
    replicas: Sequence[int],
    members: Sequence[int],
) -> tuple[Level, ...]:
    """Return what may be planned, the most promising first.

    Args:
        graph: as captured.
        cluster: all devices.
        source: the optimizer's part.
        options: what was asked for besides.
        replicas: the numbers to look at.
        members: of a tensor group, likewise; 1: none.
    """
    known = _Known(graph, cluster, source, options)
    found = [known.level(r, t) for t in members for r in replicas if known.is_possible(r, t)]
    return tuple(sorted(found, key=lambda each: (not each.fits, each.about_s)))


def open_numbers(cluster: Cluster, options: Options) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of replicas and of members that are left open, or those asked for."""
    replicas = numbers(cluster) if options.replicas == 0 else (options.replicas or 1,)
    members = (1, *_MEMBERS) if options.tensor == 0 else (options.tensor or 1,)
    return replicas, members


class _Known:
    """What the closed form is made of: mutable, remembers what it worked out."""

    def __init__(self, graph: Graph, cluster: Cluster, source: Source, options: Options) -> None:
        self.graph, self.cluster, self.source, self.options = graph, cluster, source, options
        self._all_s: dict[tuple[int, int], float] = {}

    def is_possible(self, replicas: int, members: int) -> bool:
        """Whether devices and rows divide so, and a plan of it is not too large to be made."""
        each, batch = len(self.cluster.devices) // replicas, self.graph.batch
        if each % members or batch % (replicas * (self.graph.static_batch or 1)):
            return False
        if has_many_messages(replicas):
            return False
        return members == 1 or (bool(self._axes(members)) and self._grouping(members) is not None)

    def level(self, replicas: int, members: int) -> Level:
        """Work out one."""
        zero = self.options.zero_stage
        if replicas > 1 and not zero and not self._fits(replicas, 1):
            zero = 1
        parts = replicas if zero else 1
        chosen = replace(
            self.options, replicas=replicas, tensor=members, zero_stage=zero if replicas > 1 else 0
        )
        if replicas == 1 and chosen.all_reduce_order != "tree":
            chosen = replace(chosen, sum_order="replica")
        return Level(chosen, self._about_s(replicas, members), self._fits(replicas, parts))

    def _fits(self, replicas: int, parts: int) -> bool:
        state = max((self.source.optimizer_state, *self.source.optimizer_states.values()))
        times = 1 + (GRADIENTS + state / parts if self.graph.training else 0.0)
        room = sum(tensor_bytes(device) for device in self.cluster.devices) / replicas
        return times * self._held_bytes <= ROOM * room

    def _about_s(self, replicas: int, members: int) -> float:
        stages = len(self.cluster.devices) // (replicas * members)
        each = self.graph.batch // replicas
        rows = [n for n in self._rows if each % n == 0]
        uneven = 1 + self._largest * (stages - 1) / 2
        paces = {n: self._pace_s(n, members) * replicas * uneven for n in rows}
        return min((each // n + stages - 1) * s for n, s in paces.items()) + self._sums_s(replicas)

    def _sums_s(self, replicas: int) -> float:
        """Return what summing gradients takes: each device's part goes there and back."""
        if replicas == 1:
            return 0.0
        devices = self.cluster.devices
        each = len(devices) // replicas
        rate = bytes_per_s(self.cluster, devices[0].name, devices[each].name)
        return 2 * (replicas - 1) / replicas * self._held_bytes / each / rate

    def _pace_s(self, rows: int, members: int) -> float:
        """Return the seconds of a micro-batch on all devices together, whatever replica's."""
        key = rows, members
        if key not in self._all_s:
            costs = estimated(
                self.graph.at(rows), self._firsts, self.source, self.options.estimator
            )
            ops = {name: costs.ops[first] for name, first in self._first_of.items()}
            whole = replace(costs.alone or costs, ops=ops, cluster=self.cluster)
            prices = Prices(whole, self.cluster, 1)
            grouping = self._grouping(members)
            assert grouping is not None
            self._all_s[key] = prices.least_s(self._of_rows(members, rows), grouping)
        return self._all_s[key]

    @cached_property
    def _largest(self) -> float:
        """The largest op's share of all work."""
        graph = self.graph.at(self._rows[0])
        costs = estimated(graph, self._firsts, self.source, self.options.estimator)
        ops = next(iter(costs.ops.values())).values()
        each_s = [cost.forward_s + cost.backward_s for cost in ops]
        return max(each_s, default=0.0) / max(sum(each_s), 1e-300)

    @cached_property
    def _rows(self) -> tuple[int, ...]:
        return ROWS if self.graph.static_batch is None else (self.graph.static_batch,)

    @cached_property
    def _first_of(self) -> dict[str, str]:
        """The first device that costs what each does: thousands are of a few kinds."""
        firsts: dict[object, str] = {}
        return {
            device.name: firsts.setdefault(nameless(device), device.name)
            for device in self.cluster.devices
        }

    @cached_property
    def _firsts(self) -> Cluster:
        return only(self.cluster, set(self._first_of.values()))

    @cached_property
    def _held_bytes(self) -> int:
        return sum(param.spec.nbytes for param in self.graph.trained.values())

    @cached_property
    def _named(self) -> tuple[Axis, ...]:
        return named_axes(self.graph, self.options)

    def _axes(self, members: int) -> tuple[Axis, ...]:
        return chosen_axes(self._named, members) if members > 1 else ()

    def _of_rows(self, members: int, rows: int) -> tuple[Axis, ...]:
        """Return the axes with what so many rows exchange: theirs is of an example batch."""
        batch = self.graph.batch

        def some(each: Exchange) -> Exchange:
            return replace(each, nbytes=each.nbytes * rows // batch)

        return tuple(
            replace(axis, exchanges=tuple(map(some, axis.exchanges)))
            for axis in self._axes(members)
        )

    def _grouping(self, members: int) -> Grouping | None:
        try:
            return neighbours(self.cluster, members)
        except InputError:
            return None
