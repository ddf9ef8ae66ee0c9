"""Graph x Costs -> arrays: what each unit costs, makes and reads; all that the search looks at.

A unit is a group of ops that must share a device (`bigbrain_fx.units`). Nothing here knows of
splits or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Costs, Graph, Op, OpCost
from bigbrain_fx.cut import live_ops
from bigbrain_fx.tensors import Value, Weight, edges_of, once_s, values_of, weights_of
from bigbrain_fx.units import spread, units

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class OnKind:
    """What the units take on one kind of device: seconds and bytes of one micro-batch.

    `once_s` is the optimizer's time of the parameters that a unit reads first.
    """

    forward_s: Array
    backward_s: Array
    once_s: Array
    saved_bytes: Array
    workspace_bytes: Array


@dataclass(frozen=True)
class Work:
    """The units of a concrete graph, in topological order.

    Attributes:
        copies: replicated ops, and the unit that reads each first (-1: nobody does); dead ops, too.
        on: device -> figures; devices with equal figures share one object.
        state_per_byte: optimizer state per byte of trained parameters.
        gradients: how often a piece holds its parameters' gradients at once: where capture measured
            what ops hold, those of a later micro-batch are added up one by one; else twice.
        graded: whether the loss's gradient reaches a unit.
    """

    groups: tuple[tuple[str, ...], ...]
    copies: Mapping[str, int]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    on: Mapping[str, OnKind]
    state_per_byte: float
    trains: bool
    graded: tuple[bool, ...]
    gradients: int = 2

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.groups)

    def flows(self, value: Value) -> Iterator[int]:
        """Yield the readers that give a gradient back; all of them, where nothing trains."""
        for reader in value.readers:
            if not self.trains or (value.gradient_bytes and self.graded[reader]):
                yield reader

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (maker, reader), each once, sorted."""
        return edges_of(self.values)

    def placed(self, device_of_unit: Sequence[str]) -> dict[str, str]:
        """Return the device of every op; a replicated op goes to its first reader's."""
        first = device_of_unit[0] if device_of_unit else ""
        return spread(self.groups, self.copies, device_of_unit, first)


def work(graph: Graph, costs: Costs) -> Work:
    """Add up the figures of every unit of a concrete graph on every device.

    What is replicated costs its first reader, and costs nothing to send.
    """
    live = live_ops(graph)
    known = units(graph)
    groups = tuple(g for group in known.groups if (g := tuple(n for n in group if n in live)))
    unit_of = {name: i for i, group in enumerate(groups) for name in group}
    spared = frozenset(op.name for op in graph.ops if op.name not in unit_of)
    first = _first_readers(graph, unit_of, spared & live)
    first.update(dict.fromkeys(sorted(spared - live), -1))
    paid = [list(group) for group in groups]
    for name, unit in first.items():
        if unit >= 0:
            paid[unit].append(name)
    trains = graph.loss is not None
    measured = trains and any(op.saves for op in graph.ops)
    weights = tuple(weights_of(graph, paid))
    return Work(
        groups,
        first,
        tuple(values_of(graph, unit_of)),
        weights,
        _by_kind(graph, costs, paid, weights, trains, measured),
        costs.optimizer_state_per_byte,
        trains,
        tuple(not graph.graded.isdisjoint(group) for group in groups),
        1 if measured else 2,
    )


def _first_readers(
    graph: Graph, unit_of: Mapping[str, int], replicated: frozenset[str]
) -> dict[str, int]:
    """Return, for each replicated op, the first unit that needs it, directly or through others."""
    found: dict[str, int] = {}
    for op in reversed(graph.ops):
        if op.name in replicated:
            readers = (unit_of.get(r, found.get(r, -1)) for r in graph.consumers[op.name])
            found[op.name] = min((unit for unit in readers if unit >= 0), default=-1)
    return {name: found[name] for name in sorted(found)}


def _by_kind(
    graph: Graph,
    costs: Costs,
    paid: Sequence[Sequence[str]],
    weights: Sequence[Weight],
    trains: bool,
    measured: bool,
) -> dict[str, OnKind]:
    known: dict[tuple[object, ...], OnKind] = {}
    found = {}
    added = np.zeros(len(paid))  # a gradient that is being added up, and the sum
    for weight in weights if measured else ():
        for unit in weight.readers:
            added[unit] = max(added[unit], 2.0 * weight.trained_bytes)
    for device in costs.cluster.devices:
        name = device.name
        rates = costs.optimizer_s(name, 1, 0), costs.optimizer_s(name, 0, 1 << 20)
        key = (id(costs.ops[name]), *rates)
        if key not in known:
            of = costs.ops[name]
            saved, workspace = _bytes(graph, of, paid, trains)
            known[key] = OnKind(
                *_times(of, paid, trains),
                once_s(costs, name, weights, len(paid)),
                saved,
                workspace + added,
            )
        found[name] = known[key]
    return found


def _times(
    of: Mapping[str, OpCost], paid: Sequence[Sequence[str]], trains: bool
) -> tuple[Array, Array]:
    each = [[of[name] for name in names] for names in paid]
    forward = [sum(cost.forward_s for cost in costs) for costs in each]
    backward = [sum(cost.backward_s for cost in costs) if trains else 0.0 for costs in each]
    return np.array(forward, dtype=np.float64), np.array(backward, dtype=np.float64)


def _bytes(
    graph: Graph, of: Mapping[str, OpCost], paid: Sequence[Sequence[str]], trains: bool
) -> tuple[Array, Array]:
    saved = [sum(of[name].saved_bytes for name in names) if trains else 0 for names in paid]
    most = [
        max(_number(graph.op[name]) + of[name].workspace_bytes for name in names) for names in paid
    ]
    return np.array(saved, dtype=np.float64), np.array(most, dtype=np.float64)


def _number(op: Op) -> int:
    assert isinstance(op.writes_bytes, int), "the graph is concrete: graph.at(rows)"
    return op.writes_bytes
