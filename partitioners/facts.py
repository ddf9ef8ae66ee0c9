"""Graph x Costs -> numbers per unit: all that a partitioner needs to know, and no tensor names.

A unit is a group of ops that must share a device (`bigbrain_fx.units`). This file knows no method:
every partitioner may start from these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Costs, Graph, Op
from bigbrain_fx.units import units

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]
_Number = TypeVar("_Number", np.float64, np.int64)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one unit makes and other units read.

    `nbytes` go forward to every device that reads it; `gradient_bytes` (0 when no gradient flows
    through it) come back.
    """

    maker: int
    readers: tuple[int, ...]
    nbytes: int
    gradient_bytes: int


AHEAD = 2
"""Receives that the runtime posts ahead on every channel: so much room is taken for them."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant, tied names counted once, and the units that read it."""

    readers: tuple[int, ...]
    nbytes: int
    trained_bytes: int


@dataclass(frozen=True)
class Facts:
    """What each unit costs, makes and reads, in the order of `groups`.

    Attributes:
        groups: the ops of each unit; the units in topological order.
        copies: replicated ops, and the unit that reads each first (-1: nobody does).
        seconds: device -> forward and backward of one micro-batch, per unit.
        once_s: device -> work done once a step (the optimizer), per unit.
        saved_bytes, workspace_bytes: device -> bytes, per unit; as in `OpCost`, but the workspace
            includes the results of the op that needs the most, or what the optimizer needs.
        state_per_byte: optimizer state per byte of trained parameters.
        trains: whether there is a backward pass.
        rows: of the micro-batch that all this is for.
        recompute: whether every stage runs its forward again; `seconds` have that.
    """

    groups: tuple[tuple[str, ...], ...]
    copies: Mapping[str, int]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    seconds: Mapping[str, Seconds]
    once_s: Mapping[str, Seconds]
    saved_bytes: Mapping[str, Bytes]
    workspace_bytes: Mapping[str, Bytes]
    state_per_byte: float
    trains: bool
    rows: int
    recompute: bool = False

    def kept(self, in_flight: int) -> int:
        """Return for how many micro-batches a stage keeps what its backward needs."""
        return 1 if self.recompute else in_flight

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (maker, reader) of units, each once, sorted."""
        return tuple(sorted({(v.maker, reader) for v in self.values for reader in v.readers}))

    def reordered(self, order: Sequence[int]) -> Facts:
        """Return the same facts with the units in another order: `order[new] = old`."""
        position = {old: new for new, old in enumerate(order)}
        return self._renumbered(position, [[old] for old in order])

    def merged(self, blocks: Sequence[Sequence[int]]) -> Facts:
        """Return the facts with consecutive units made one: `blocks[new]` lists them."""
        position = {old: new for new, block in enumerate(blocks) for old in block}
        return self._renumbered(position, blocks)

    def smaller(self, factor: int) -> Facts:
        """Return the facts for micro-batches of 1/factor of the rows, as far as bytes go."""
        values = tuple(
            replace(v, nbytes=v.nbytes // factor, gradient_bytes=v.gradient_bytes // factor)
            for v in self.values
        )
        saved = {device: array // factor for device, array in self.saved_bytes.items()}
        workspace = {device: array // factor for device, array in self.workspace_bytes.items()}
        return replace(self, values=values, saved_bytes=saved, workspace_bytes=workspace)

    def placed(self, device_of_unit: Sequence[str], first_device: str) -> dict[str, str]:
        """Return the device of every op; a replicated op goes to its first reader's."""
        found = {
            name: device
            for group, device in zip(self.groups, device_of_unit, strict=True)
            for name in group
        }
        for name, unit in self.copies.items():
            found[name] = device_of_unit[unit] if unit >= 0 else first_device
        return found

    def _renumbered(self, position: Mapping[int, int], blocks: Sequence[Sequence[int]]) -> Facts:
        starts = np.cumsum([0, *(len(block) for block in blocks)])[:-1]
        flat = [old for block in blocks for old in block]

        def summed(arrays: Mapping[str, NDArray[_Number]]) -> dict[str, NDArray[_Number]]:
            return {d: np.add.reduceat(a[flat], starts) for d, a in arrays.items()}

        return replace(
            self,
            groups=tuple(tuple(n for old in block for n in self.groups[old]) for block in blocks),
            copies={name: position.get(unit, -1) for name, unit in self.copies.items()},
            values=tuple(_values_at(self.values, position)),
            weights=tuple(replace(w, readers=_at(w.readers, position)) for w in self.weights),
            seconds=summed(self.seconds),
            once_s=summed(self.once_s),
            saved_bytes=summed(self.saved_bytes),
            workspace_bytes={
                d: np.maximum.reduceat(a[flat], starts) for d, a in self.workspace_bytes.items()
            },
        )


def _values_at(values: Iterable[Value], position: Mapping[int, int]) -> Iterator[Value]:
    for value in values:
        maker = position[value.maker]
        readers = tuple(reader for reader in _at(value.readers, position) if reader != maker)
        if readers:
            yield replace(value, maker=maker, readers=readers)


def _at(unit_numbers: Iterable[int], position: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({position[number] for number in unit_numbers}))


def facts(graph: Graph, costs: Costs) -> Facts:
    """Add up the numbers of every unit of a concrete graph.

    Replicated ops (masks, position ids) are free to read anywhere: their time is counted at their
    first reader, their constants and workspace at every reader.
    """
    found = units(graph)
    unit_of = {name: number for number, group in enumerate(found.groups) for name in group}
    copied = _copied(graph, found.groups, found.replicated)
    first = {name: -1 for name in sorted(found.replicated)}
    for number, names in reversed(list(enumerate(copied))):
        first.update(dict.fromkeys(names, number))
    paid = [
        [*group, *(name for name in names if first[name] == number)]
        for number, (group, names) in enumerate(zip(found.groups, copied, strict=True))
    ]
    held = [[*group, *names] for group, names in zip(found.groups, copied, strict=True)]
    weights = tuple(_weights(graph, held))
    trains = graph.loss is not None
    devices = [device.name for device in costs.cluster.devices]
    first_of: dict[int, str] = {}  # devices whose ops cost the same share their figures
    like = {d: first_of.setdefault(id(costs.ops[d]), d) for d in devices}
    firsts = list(first_of.values())
    seconds = {d: _seconds(costs, d, paid, trains) for d in firsts}
    saved = {d: _saved(costs, d, paid, trains) for d in firsts}
    workspace = {d: _workspace(graph, costs, d, held) for d in firsts}
    return Facts(
        groups=found.groups,
        copies=first,
        values=tuple(_values(graph, unit_of)),
        weights=weights,
        seconds={d: seconds[like[d]] for d in devices},
        once_s={d: _once_s(costs, d, weights, len(paid)) for d in devices},
        saved_bytes={d: saved[like[d]] for d in devices},
        workspace_bytes={d: workspace[like[d]] for d in devices},
        state_per_byte=costs.optimizer_state_per_byte,
        trains=trains,
        rows=graph.batch,
        recompute=trains and costs.recompute,
    )


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


def _values(graph: Graph, unit_of: Mapping[str, int]) -> Iterator[Value]:
    for name, maker in unit_of.items():
        op = graph.op[name]
        readers = sorted({unit_of[r] for r in graph.consumers[name] if r in unit_of} - {maker})
        if readers:
            nbytes = _result_bytes(op)
            gradient = nbytes if op.requires_grad and graph.loss is not None else 0
            yield Value(maker, tuple(readers), nbytes, gradient)


def _result_bytes(op: Op) -> int:
    return sum(spec.nbytes for spec in op.outputs)


def _weights(graph: Graph, held: Iterable[Sequence[str]]) -> Iterator[Weight]:
    readers: dict[str, dict[int, None]] = {}
    for number, names in enumerate(held):
        for name in names:
            for key in graph.op[name].params:
                readers.setdefault(graph.param[key].canonical, {})[number] = None
    spec_of = {param.canonical: param for param in reversed(graph.params)}
    for canonical, numbers in readers.items():
        param = spec_of[canonical]
        trained = param.kind == "parameter" and param.spec.requires_grad and graph.loss is not None
        nbytes = param.spec.nbytes
        yield Weight(tuple(numbers), nbytes, nbytes if trained else 0)


def _seconds(costs: Costs, device: str, paid: Iterable[Sequence[str]], trains: bool) -> Seconds:
    of, forwards = costs.ops[device], 2 if trains and costs.recompute else 1
    return np.array(
        [
            sum(forwards * of[n].forward_s + (of[n].backward_s if trains else 0.0) for n in names)
            for names in paid
        ],
        dtype=np.float64,
    )


def _once_s(costs: Costs, device: str, weights: Iterable[Weight], count: int) -> Seconds:
    """Count the optimizer's time for each parameter at the first unit that reads it."""
    found = np.zeros(count)
    for weight in weights:
        if weight.trained_bytes:
            found[weight.readers[0]] += costs.optimizer_s(device, 1, weight.trained_bytes)
    return found


def _saved(costs: Costs, device: str, paid: Iterable[Sequence[str]], trains: bool) -> Bytes:
    of = costs.ops[device]
    each = [sum(of[name].saved_bytes for name in names) if trains else 0 for names in paid]
    return np.array(each, dtype=np.int64)


def _workspace(graph: Graph, costs: Costs, device: str, held: Iterable[Sequence[str]]) -> Bytes:
    of = costs.ops[device]
    each = [
        max(
            max(int(graph.op[name].writes_bytes) + of[name].workspace_bytes for name in names),
            _while_updated(graph, costs, names),
        )
        for names in held
    ]
    return np.array(each, dtype=np.int64)


def _while_updated(graph: Graph, costs: Costs, names: Iterable[str]) -> int:
    """Return what the optimizer holds for a moment while it updates the largest parameter."""
    params = (graph.param[key] for name in names for key in graph.op[name].params)
    sizes = (p.spec.nbytes for p in params if p.kind == "parameter" and p.spec.requires_grad)
    return int(costs.optimizer_temporaries * max(sizes, default=0)) if graph.loss else 0
