"""Graph x Costs -> arrays: what each unit costs, makes, reads and keeps; all that planners look at.

A unit is a group of ops that must share a device (`bigbrain_fx.planning.units`). Nothing here knows
of splits or schedules, and no method: every planner may start from these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Costs, Device, Graph, OpCost
from bigbrain_fx.planning.device_kinds import cost_ranks
from bigbrain_fx.planning.keeping import Keeping, keeping
from bigbrain_fx.planning.units import (
    GraphMemo,
    Value,
    Weight,
    concrete,
    edges_of,
    live_ops,
    once_s,
    spread,
    units,
    values_of,
    weights_of,
)

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class OnKind:
    """Times and bytes of the units on one kind of device, for one micro-batch.

    Attributes:
        once_s: the optimizer's time of the parameters that a unit reads first.
        saved_bytes: from forward to backward; a storage at the first unit that keeps it.
        workspace_bytes: while a unit runs: what its op that needs most makes and works with.
        updated_bytes: while the optimizer runs.
        keeping: the same as the first two, for pieces of a chain: storages have two ends there.
    """

    forward_s: Array
    backward_s: Array
    once_s: Array
    saved_bytes: Array
    workspace_bytes: Array
    updated_bytes: Array
    keeping: Keeping

    def merged(self, blocks: Sequence[Sequence[int]], position: Mapping[int, int]) -> OnKind:
        """Return the figures with units made one."""
        flat = [old for block in blocks for old in block]
        starts = np.cumsum([0, *(len(block) for block in blocks)])[:-1]

        def summed(each: Array) -> Array:
            return np.add.reduceat(each[flat], starts)

        def largest(each: Array) -> Array:
            return np.maximum.reduceat(each[flat], starts)

        return OnKind(
            summed(self.forward_s),
            summed(self.backward_s),
            summed(self.once_s),
            summed(self.saved_bytes),
            largest(self.workspace_bytes),
            largest(self.updated_bytes),
            self.keeping.merged(flat, starts, position),
        )


@dataclass(frozen=True)
class Work:
    """The units of a concrete graph, in topological order.

    Attributes:
        groups: the ops of each unit.
        copies: replicated ops, and the unit that reads each first (-1: nobody does); dead ops, too.
        on: device -> figures; devices with equal figures share one object.
        state_per_byte: optimizer state per byte of trained parameters.
        trains: whether there is a backward pass.
        graded: whether the loss's gradient reaches a unit.
        rows: of the micro-batch that all this is for.
        recompute: whether every stage runs its forward again.
        ranks: device -> a number, equal where all ops cost the same: see `cost_ranks`.
    """

    groups: tuple[tuple[str, ...], ...]
    copies: Mapping[str, int]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    on: Mapping[str, OnKind]
    state_per_byte: float
    trains: bool
    graded: tuple[bool, ...]
    rows: int = 1
    recompute: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.groups)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (maker, reader), each once, sorted."""
        return edges_of(self.values)

    @cached_property
    def seconds(self) -> Mapping[str, Array]:
        """Device -> forward and backward of one micro-batch, and the second forward if any."""
        forwards = 2.0 if self.recompute else 1.0
        return {d: forwards * on.forward_s + on.backward_s for d, on in self.on.items()}

    @cached_property
    def once_s(self) -> Mapping[str, Array]:
        """Device -> the optimizer's seconds, once a step, per unit."""
        return {device: on.once_s for device, on in self.on.items()}

    @cached_property
    def saved_bytes(self) -> Mapping[str, Array]:
        """Device -> what each unit keeps from forward to backward."""
        return {device: on.saved_bytes for device, on in self.on.items()}

    @cached_property
    def workspace_bytes(self) -> Mapping[str, Array]:
        """Device -> what each unit holds while it runs."""
        return {device: on.workspace_bytes for device, on in self.on.items()}

    def flows(self, value: Value) -> Iterator[int]:
        """Yield the readers that give a gradient back; all of them, where nothing trains."""
        for reader in value.readers:
            if not self.trains or (value.gradient_bytes and self.graded[reader]):
                yield reader

    def kept(self, in_flight: int) -> int:
        """Return for how many micro-batches a stage keeps what its backward needs."""
        return 1 if self.recompute else in_flight

    def placed(self, device_of_unit: Sequence[str], first_device: str = "") -> dict[str, str]:
        """Return the device of every op; a replicated op goes to its first reader's."""
        first = first_device or (device_of_unit[0] if device_of_unit else "")
        return spread(self.groups, self.copies, device_of_unit, first)

    def merged(self, blocks: Sequence[Sequence[int]]) -> Work:
        """Return the work with units made one: `blocks[new]` lists them."""
        position = {old: new for new, block in enumerate(blocks) for old in block}
        return replace(
            self,
            on=self._changed(lambda on: on.merged(blocks, position)),
            groups=tuple(tuple(n for old in block for n in self.groups[old]) for block in blocks),
            copies={name: position.get(unit, -1) for name, unit in self.copies.items()},
            values=tuple(_values_at(self.values, position)),
            weights=tuple(replace(w, readers=_at(w.readers, position)) for w in self.weights),
            graded=tuple(any(self.graded[old] for old in block) for block in blocks),
        )

    def _changed(self, change: Callable[[OnKind], OnKind]) -> Mapping[str, OnKind]:
        """Return other figures; devices go on sharing them."""
        once = {id(on): on for on in self.on.values()}  # hundreds of devices share a few
        changed = {key: change(on) for key, on in once.items()}
        return {device: changed[id(on)] for device, on in self.on.items()}


def _values_at(values: Iterable[Value], position: Mapping[int, int]) -> Iterator[Value]:
    for value in values:
        maker = position[value.maker]
        readers = tuple(reader for reader in _at(value.readers, position) if reader != maker)
        if readers:
            yield replace(value, maker=maker, readers=readers)


def _at(unit_numbers: Iterable[int], position: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({position[number] for number in unit_numbers}))


def work(graph: Graph, costs: Costs) -> Work:
    """Add up the figures of every unit of a concrete graph on every device.

    Replicated ops (masks, position ids) are free to read anywhere: their time is counted at their
    first reader, their constants and workspace at every reader. Dead ops count nowhere.
    """
    parts = _parts.get(graph, None, lambda: _Parts.of(graph))
    trains = graph.loss is not None
    return Work(
        parts.groups,
        parts.first,
        parts.values,
        parts.weights,
        _by_device(graph, costs, parts),
        costs.optimizer_state_per_byte,
        trains,
        tuple(not graph.graded.isdisjoint(group) for group in parts.groups),
        graph.batch,
        trains and costs.recompute,
        cost_ranks(costs),
    )


@dataclass(frozen=True)
class _Parts:
    """Contents of units, whatever they cost.

    Attributes:
        groups: the ops of each unit.
        first: replicated or dead op -> the unit that pays for it.
        values: between units.
        weights: and who reads them.
        paid: the ops whose time counts at each unit.
        held: the ops whose memory does.
    """

    groups: tuple[tuple[str, ...], ...]
    first: Mapping[str, int]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    paid: Sequence[Sequence[str]]
    held: Sequence[Sequence[str]]

    @staticmethod
    def of(graph: Graph) -> _Parts:
        live = live_ops(graph)
        known = units(graph)
        groups = tuple(g for group in known.groups if (g := tuple(n for n in group if n in live)))
        unit_of = {name: i for i, group in enumerate(groups) for name in group}
        copied = _copied(graph, groups, known.replicated)
        first = {op.name: -1 for op in graph.ops if op.name not in unit_of}
        for number, names in reversed(list(enumerate(copied))):
            first.update(dict.fromkeys(names, number))
        first = {name: first[name] for name in sorted(first)}
        paid = [
            [*group, *(name for name in names if first[name] == number)]
            for number, (group, names) in enumerate(zip(groups, copied, strict=True))
        ]
        held = [[*group, *names] for group, names in zip(groups, copied, strict=True)]
        placed = {op.name: unit_of[op.name] for op in graph.ops if op.name in unit_of}
        values, weights = tuple(values_of(graph, placed)), tuple(weights_of(graph, held))
        return _Parts(groups, first, values, weights, paid, held)


_parts = GraphMemo[_Parts]()


def _copied(
    graph: Graph, groups: Iterable[tuple[str, ...]], replicated: frozenset[str]
) -> list[list[str]]:
    """List the replicated ops that each unit needs, directly or through others, in graph order."""
    needs: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        if op.name in replicated:
            deeper = () if op.target == "aten.sym_size.int" else op.refs
            needs[op.name] = frozenset({op.name}).union(*(needs.get(ref, ()) for ref in deeper))
    index = {op.name: i for i, op in enumerate(graph.ops)}
    return [
        sorted(
            {n for name in group for ref in graph.op[name].refs for n in needs.get(ref, ())},
            key=lambda name: index[name],
        )
        for group in groups
    ]


def _by_device(graph: Graph, costs: Costs, parts: _Parts) -> dict[str, OnKind]:
    """Return the figures of each device; devices that cost the same share them, as do plans."""
    return {d.name: _shared(graph, costs, d, parts) for d in costs.cluster.devices}


def _shared(graph: Graph, costs: Costs, device: Device, parts: _Parts) -> OnKind:
    of, name = costs.ops[device.name], device.name
    rates = costs.optimizer_s(name, 1, 0), costs.optimizer_s(name, 0, 1 << 20)
    key = id(of), device.kind, *rates, costs.optimizer_temporaries, costs.optimizer_leftover
    make = partial(_on_kind, graph, costs, of, device, parts)
    return _on_kinds.get(graph, key, lambda: (of, make()))[1]


_on_kinds = GraphMemo[tuple[Mapping[str, OpCost], OnKind]]()
"""Each with the costs that its key has by identity, so that these live as long."""


def _on_kind(
    graph: Graph, costs: Costs, of: Mapping[str, OpCost], device: Device, parts: _Parts
) -> OnKind:
    paid, held, kind = parts.paid, parts.held, device.kind
    taken_s = once_s(costs, device.name, parts.weights, len(paid))
    trains = graph.loss is not None
    each = [[of[name] for name in names] for names in paid]
    updated = [_while_updated(graph, costs, names) for names in held]
    made = {name: concrete(graph.op[name].writes_bytes) for names in held for name in names}
    most = [max(made[name] + of[name].workspace_bytes for name in names) for names in held]
    return OnKind(
        _array(sum(cost.forward_s for cost in ops) for ops in each),
        _array(sum(cost.backward_s for cost in ops) if trains else 0.0 for ops in each),
        taken_s,
        _array(sum(cost.saved_bytes for cost in ops) if trains else 0 for ops in each),
        _array(map(max, most, updated)),
        _array(updated),
        keeping(graph, of, held, kind),
    )


def _while_updated(graph: Graph, costs: Costs, names: Iterable[str]) -> int:
    """Return what the optimizer holds for a moment while it updates the largest parameter."""
    params = (graph.param[key] for name in names for key in graph.op[name].params)
    sizes = (p.spec.nbytes for p in params if p.is_trained)
    most = costs.optimizer_temporaries + costs.optimizer_leftover
    return int(most * max(sizes, default=0)) if graph.loss else 0


def _array(each: Iterable[float]) -> Array:
    return np.fromiter(each, dtype=np.float64)


def whole_layers(graph: Graph, known: Work) -> Work:
    """Return the work whose units are the runs of units of one layer each."""
    return known.merged(layers(graph, known.groups))


def layers(graph: Graph, groups: Sequence[Sequence[str]]) -> list[range]:
    """Return the runs of units that belong to one layer: `blocks.3` and all below it."""
    firsts = [graph.op[group[0]] for group in groups]
    layers = [op.layer or op.module_path.partition(".")[0] for op in firsts]
    starts = [i for i, layer in enumerate(layers) if i == 0 or not layer or layer != layers[i - 1]]
    return [range(a, b) for a, b in pairwise([*starts, len(groups)])]
