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

from bigbrain_fx.core import Costs, Graph
from bigbrain_fx.tensors import Value, Weight, edges_of, once_s, values_of, weights_of
from bigbrain_fx.units import spread, units

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]
_Number = TypeVar("_Number", np.float64, np.int64)


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
        return edges_of(self.values)

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
        return spread(self.groups, self.copies, device_of_unit, first_device)

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
    weights = tuple(weights_of(graph, held))
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
        values=tuple(values_of(graph, unit_of)),
        weights=weights,
        seconds={d: seconds[like[d]] for d in devices},
        once_s={d: once_s(costs, d, weights, len(paid)) for d in devices},
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


def _seconds(costs: Costs, device: str, paid: Iterable[Sequence[str]], trains: bool) -> Seconds:
    of, forwards = costs.ops[device], 2 if trains and costs.recompute else 1
    return np.array(
        [
            sum(forwards * of[n].forward_s + (of[n].backward_s if trains else 0.0) for n in names)
            for names in paid
        ],
        dtype=np.float64,
    )


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
