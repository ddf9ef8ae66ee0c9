"""Graph -> Units: what a planner may place, and what it need not, since any stage may copy it.

This module knows which ops must share a device; it knows nothing of devices, costs or stages.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import networkx as nx

from bigbrain_fx.core import Costs, Graph, Op, OpCost, Saves

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# ------------------------------------------------------------------------------------------------
# What was worked out of a graph, kept as long as the graph is alive: plans ask for it again.


T = TypeVar("T")


MOST = 16
"""Values of one graph that are kept; then the oldest goes."""


class GraphMemo(Generic[T]):
    """Values by graph and key; graphs go by identity, as comparing them would take longer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Graph], dict[Hashable, T]]] = {}

    def get(self, graph: Graph, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a graph and key; make it where it was not."""
        found = self._known.get(id(graph))
        if found is None or found[0]() is not graph:
            found = weakref.ref(graph, partial(self._forget, id(graph))), {}
            self._known[id(graph)] = found
        values = found[1]
        if key not in values:
            made = make()
            if len(values) >= MOST:
                del values[next(iter(values))]
            values[key] = made
        return values[key]

    def _forget(self, key: int, _graph: weakref.ref[Graph]) -> None:
        self._known.pop(key, None)


# ------------------------------------------------------------------------------------------------
# Graph -> Units: what a planner may place, and what it need not, since any stage may copy it.


FLOPS_PER_BYTE_CAP = 16  # above this, a value is worth sending; element-wise code stays below
FLOPS_FLOOR = 1e7  # a tiny product (a rotary table's outer one) is always cheaper than a message

_Class = TypeVar("_Class", str, int)


@dataclass(frozen=True)
class Units:
    """Groups of ops that must share a device, in topological order (no cycles between groups).

    `groups` covers every op that is not in `replicated`. `replicated` are cheap values: position
    ids, masks, rotary tables. Each stage that reads one computes a copy, so that nothing is sent;
    they may be given any device.
    """

    groups: tuple[tuple[str, ...], ...]
    replicated: frozenset[str]


def units(graph: Graph) -> Units:
    """Group the ops of a graph.

    A group has a tuple and the ops that take it apart, or everything that touches a mutated buffer.
    Or it has a mutated value with its views, its writers and its readers before the last write.
    Groups that would form a cycle are joined. Views of values that nobody mutates need no
    co-location.

    Returns:
        The groups in an order in which they could run; deterministic for a given graph.
    """
    return _known.get(graph, None, lambda: _grouped(graph))


_known = GraphMemo[Units]()


def _grouped(graph: Graph) -> Units:
    index = {op.name: i for i, op in enumerate(graph.ops)}
    replicated = frozenset(_replicated(graph))
    classes = nx.utils.UnionFind([op.name for op in graph.ops if op.name not in replicated])
    for group in _must_share(graph, index):
        members = [name for name in group if name not in replicated]
        if members:
            classes.union(*members)
    class_of = {name: classes[name] for name in classes}
    merged = _merge_cycles(graph, class_of)
    members_of: dict[int, list[str]] = defaultdict(list)
    for name, component in merged.items():
        members_of[component].append(name)
    return Units(tuple(_in_order(graph, members_of, merged, index)), replicated)


def live_ops(graph: Graph) -> frozenset[str]:
    """Return the ops that the loss (else an output) depends on, that write state, or that check."""
    wanted = [graph.loss] if graph.loss else list(graph.outputs)
    pending = [name for name in wanted if name in graph.op]
    pending += [op.name for op in graph.ops if any(name in graph.param for name in op.mutates)]
    pending += [op.name for op in graph.ops if op.checks or op.state]
    writers = defaultdict(list)
    for op in graph.ops:
        for name in op.mutates:
            writers[name].append(op.name)
    live: set[str] = set()
    while pending:
        name = pending.pop()
        if name in live:
            continue
        live.add(name)
        pending += [ref for ref in graph.op[name].refs if ref in graph.op]
        pending += writers[name]
    return frozenset(live)


def spread(
    groups: Sequence[Sequence[str]],
    copies: Mapping[str, int],
    of_unit: Sequence[str],
    of_unread: str,
) -> dict[str, str]:
    """Give every op what its unit was given, its device, say."""
    pairs = zip(groups, of_unit, strict=True)
    found = {name: given for group, given in pairs for name in group}
    for name, unit in copies.items():
        found[name] = of_unit[unit] if unit >= 0 else of_unread
    return found


def is_size(op: Op) -> bool:
    """Whether the op computes a number (a tensor's size, arithmetic on sizes), not a tensor."""
    plain = not op.outputs and not op.mutates and op.body is None
    return plain and not op.is_tuple and not op.checks


def mutated_roots(graph: Graph) -> frozenset[str]:
    """Return the params and values that some op writes into, by the name of whose storage it is."""
    root = _roots(graph)
    return frozenset(root.get(name, name) for op in graph.ops for name in op.mutates)


def _replicated(graph: Graph) -> Iterator[str]:
    """Yield what every stage may run itself: cheap, without parameter, state, dice or gradient."""
    kept: set[str] = set()
    mutated = mutated_roots(graph)
    wanted = {*graph.outputs, graph.loss}
    cheap_params = {p.name for p in graph.params if p.kind != "parameter" and p.name not in mutated}
    for op in graph.ops:
        pure = not (op.random or op.mutates or op.checks or op.state or op.requires_grad)
        pure = pure and op.name not in mutated
        local = all(ref in kept or ref in graph.input for ref in op.refs)
        stateless = cheap_params.issuperset(op.params)
        copied = pure and local and stateless and op.name not in wanted and _is_cheap(op)
        if is_size(op) or copied:
            kept.add(op.name)
            yield op.name


def _is_cheap(op: Op) -> bool:
    if not isinstance(op.flops, int):
        return True  # a symbolic graph is only grouped to look at it; plans use numbers
    moved = int(op.reads_bytes) + int(op.writes_bytes)
    return op.flops <= max(FLOPS_FLOOR, FLOPS_PER_BYTE_CAP * moved)


def _roots(graph: Graph) -> dict[str, str]:
    """Map each op to the value or param whose storage it shares, through any number of views."""
    root: dict[str, str] = {}
    for op in graph.ops:
        root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name
    return root


def _must_share(graph: Graph, index: dict[str, int]) -> Iterator[list[str]]:
    for op in graph.ops:
        if op.is_tuple:
            yield [op.name, *graph.consumers[op.name]]
        if op.checks and not graph.consumers[op.name]:  # beside what it checks
            yield [op.name, *(ref for ref in op.refs if ref in graph.op)]
    root = _roots(graph)
    touching: dict[str, list[str]] = defaultdict(list)
    last_write: dict[str, int] = {}
    for op in graph.ops:
        for name in dict.fromkeys((*op.params, *op.refs)):
            touching[root.get(name, name)].append(op.name)
        for name in op.mutates:
            last_write[root.get(name, name)] = index[op.name]
    for name, last in sorted(last_write.items()):
        family = [name] if name in index else []
        is_buffer = name in graph.param
        yield family + [reader for reader in touching[name] if is_buffer or index[reader] <= last]
    yield from _counters(graph)


def _counters(graph: Graph) -> Iterator[list[str]]:
    """Yield an op that only writes state (BatchNorm's counter) with a neighbour in its module."""
    by_module: dict[str, str] = {}
    for op in graph.ops:
        if op.outputs and graph.consumers[op.name]:
            by_module.setdefault(op.module_path, op.name)
    for op in graph.ops:
        if op.mutates and not graph.consumers[op.name] and op.module_path in by_module:
            yield [op.name, by_module[op.module_path]]


def _merge_cycles(graph: Graph, class_of: dict[str, str]) -> dict[str, int]:
    """Number the strongly connected classes: op -> component."""
    net: nx.DiGraph[str] = nx.DiGraph()
    net.add_nodes_from(sorted(set(class_of.values())))
    net.add_edges_from(_class_edges(graph, class_of))
    component = {}
    for number, members in enumerate(nx.strongly_connected_components(net)):
        component.update(dict.fromkeys(members, number))
    return {name: component[cls] for name, cls in class_of.items()}


def _class_edges(graph: Graph, class_of: Mapping[str, _Class]) -> Iterator[tuple[_Class, _Class]]:
    """Yield who feeds whom, between classes of ops that differ."""
    for op in graph.ops:
        for ref in op.refs:
            if op.name in class_of and ref in class_of and class_of[ref] != class_of[op.name]:
                yield class_of[ref], class_of[op.name]


def _in_order(
    graph: Graph, members_of: dict[int, list[str]], component: dict[str, int], index: dict[str, int]
) -> Iterator[tuple[str, ...]]:
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(sorted(members_of))
    net.add_edges_from(_class_edges(graph, component))
    first = {number: min(index[name] for name in names) for number, names in members_of.items()}
    for number in nx.lexicographical_topological_sort(net, key=lambda n: first[n]):
        yield tuple(sorted(members_of[number], key=lambda name: index[name]))


def unit_orders(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return different topological orders of units 0 .. count-1; the given order is the first.

    Depth first finishes a branch before it begins the next, so that fewer values cross a cut.
    "Late" runs every unit as shortly before its readers as it can (depth first from the end).
    """
    pairs = sorted(set(edges))
    backward = [(reader, maker) for maker, reader in pairs]
    late = tuple(reversed(depth_first(count, backward, range(count))))
    early = depth_first(count, pairs, range(count)[::-1])
    return tuple(dict.fromkeys((tuple(range(count)), early, late)))


def depth_first(
    count: int, edges: Iterable[tuple[int, int]], starts: Iterable[int]
) -> tuple[int, ...]:
    """Take, again and again, the unit that became ready last; the last of `starts` begins."""
    waiting = [0] * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for maker, reader in edges:
        waiting[reader] += 1
        readers[maker].append(reader)
    ready = [unit for unit in starts if waiting[unit] == 0]
    order: list[int] = []
    while ready:
        unit = ready.pop()
        order.append(unit)
        for reader in reversed(readers[unit]):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return tuple(order)


# ------------------------------------------------------------------------------------------------
# Graph x groups of ops -> the tensors that groups make for each other, and the weights they read.
#
# Whoever plans adds up bytes from these, each in its own way. Of devices it knows only what the
# optimizer takes on one.


AHEAD = 2
"""Receives that the runtime posts ahead on every channel: so much memory is taken for them."""


def concrete(size: object) -> int:
    """Return a size of a concrete graph as a number."""
    assert isinstance(size, int), "costs are added up over a concrete graph, graph.at(rows)"
    return size


def saves_of(graph: Graph, op: Op, cost: OpCost, kind: str) -> Saves:
    """Return what an op of a concrete graph holds on a kind of device.

    Where nobody has measured it, by the estimator's rule. CUDA's kernels may keep other things.
    """
    saves = op.saves
    if saves is None:
        if op.view_of is not None or not (op.outputs or op.mutates):
            return Saves(passed=(0,))
        forward_bytes = concrete(op.writes_bytes) + cost.saved_bytes
        return Saves((), cost.saved_bytes, forward_bytes, cost.workspace_bytes)
    if kind == "cpu" or saves.cuda_own_bytes is None:
        return saves
    own = concrete(saves.cuda_own_bytes)
    values = saves.values if saves.cuda_values is None else saves.cuda_values
    result = sum(spec.nbytes for spec in op.outputs)
    known = (graph.op[ref] for ref in op.refs if ref in graph.op)
    back = sum(spec.nbytes for reads in known for spec in reads.outputs if spec.requires_grad)
    return Saves(values, own, own + result, back, saves.passed)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that unit `maker` makes and other units read, in ascending order.

    `nbytes` go forward to every device that reads it; `gradient_bytes` (0 when no gradient flows
    through it) come back.
    """

    maker: int
    readers: tuple[int, ...]
    nbytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant, tied names counted once, and the units that read it.

    `trained_bytes` are `nbytes` where the optimizer updates it, else 0.
    """

    readers: tuple[int, ...]
    nbytes: int
    trained_bytes: int


def values_of(graph: Graph, unit_of: Mapping[str, int]) -> Iterator[Value]:
    """Yield what crosses between units of a concrete graph, in the order of `unit_of`: op -> unit.

    Ops that are no unit's are replicated: what they make is sent to nobody.
    """
    for name, maker in unit_of.items():
        readers = {unit_of[r] for r in graph.consumers[name] if r in unit_of} - {maker}
        if readers:
            op = graph.op[name]
            nbytes = sum(spec.nbytes for spec in op.outputs)
            gradient = nbytes if graph.loss is not None and op.requires_grad else 0
            yield Value(maker, tuple(sorted(readers)), nbytes, gradient)


def weights_of(graph: Graph, groups: Iterable[Iterable[str]]) -> Iterator[Weight]:
    """Yield the weights that some op reads, in the order in which units first read them.

    Args:
        graph: concrete.
        groups: the ops of each unit, with the replicated ones that count as its own.
    """
    readers: dict[str, dict[int, None]] = {}
    for number, names in enumerate(groups):
        for name in names:
            for key in graph.op[name].params:
                readers.setdefault(graph.param[key].canonical, {})[number] = None
    size_of = {param.canonical: param.spec.nbytes for param in graph.params}
    for canonical, numbers in readers.items():
        nbytes, updated = size_of[canonical], canonical in graph.trained and graph.loss is not None
        yield Weight(tuple(numbers), nbytes, nbytes if updated else 0)


def edges_of(values: Iterable[Value]) -> tuple[tuple[int, int], ...]:
    """Return pairs (maker, reader) of units, each once, sorted."""
    return tuple(sorted({(v.maker, reader) for v in values for reader in v.readers}))


def once_s(costs: Costs, device: str, weights: Sequence[Weight], units: int) -> NDArray[np.float64]:
    """Return the optimizer's seconds a step for each unit: a weight's at its first reader."""
    import numpy as np  # a program that only asks for sizes needs none

    found = np.zeros(units)
    for weight in weights:
        if weight.trained_bytes:
            found[weight.readers[0]] += costs.optimizer_s(device, 1, weight.trained_bytes)
    return found
