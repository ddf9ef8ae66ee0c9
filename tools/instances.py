"""A published planning problem, its two objectives, and the `Problem` that planners see of it.

The objectives follow the publication to the letter and know no planner. `instance_files` reads
the public formats.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import numpy as np

from tools.load_solvers.problem import Kind, Net, Problem


@dataclass(frozen=True, slots=True)
class Node:
    """One layer or operator.

    Attributes:
        times: per kind of device, in the file's own unit; infinite where it cannot run.
        nbytes: memory, in bytes.
        backward: whether it belongs to the backward pass.
        together: nodes with the same number must share a device.
    """

    name: str
    times: tuple[float, ...]
    nbytes: float
    backward: bool = False
    together: int | None = None


@dataclass(frozen=True)
class Instance:
    """One published planning problem.

    Attributes:
        edges: (maker, reader, time to move the maker's output between a device and the host).
        transfer: per kind: what multiplies that time; 0 for CPUs, which share the host's memory.
    """

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int, float], ...]
    kinds: tuple[Kind, ...]
    transfer: tuple[float, ...]

    @cached_property
    def kind_of_device(self) -> tuple[int, ...]:
        """The kind of every device; devices are numbered kind by kind."""
        return tuple(i for i, kind in enumerate(self.kinds) for _ in range(kind.count))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The node of `problem` that each node belongs to."""
        return _grouped(self)[0]

    @cached_property
    def problem(self) -> Problem:
        """The problem with nodes that must share a device made one."""
        return _problem(self)

    def spread(self, homes: Sequence[int]) -> tuple[int, ...]:
        """Return the device of every node from the device of every group."""
        return tuple(homes[group] for group in self.group_of)


def max_load(instance: Instance, homes: Sequence[int]) -> float:
    """Return the largest device load: the time per sample of a full pipeline.

    load = sum of times + for each producer with an edge that crosses the device's boundary, in
    either direction, its transfer time, once.

    Args:
        instance: the problem.
        homes: the device of every node.

    Source: Tarnawski et al., NeurIPS'20.
    """
    kinds = instance.kind_of_device
    loads = [0.0] * len(kinds)
    crossing: dict[tuple[int, int], float] = {}
    for number, node in enumerate(instance.nodes):
        loads[homes[number]] += node.times[kinds[homes[number]]]
    for maker, reader, time in instance.edges:
        if homes[maker] != homes[reader]:
            for home in (homes[maker], homes[reader]):
                moved = time * instance.transfer[kinds[home]]
                crossing[maker, home] = max(crossing.get((maker, home), 0.0), moved)
    for (_, home), time in crossing.items():
        loads[home] += time
    return max(loads)


def feasible(instance: Instance, homes: Sequence[int]) -> bool:
    """Whether memory, supported devices and nodes that must share a device are respected."""
    kinds = instance.kind_of_device
    held = [0.0] * len(kinds)
    home_of: dict[int, int] = {}
    for node, home in zip(instance.nodes, homes, strict=True):
        held[home] += node.nbytes
        if node.times[kinds[home]] == float("inf"):
            return False
        if node.together is not None and home_of.setdefault(node.together, home) != home:
            return False
    limits = [instance.kinds[kind].memory_bytes for kind in kinds]
    return all(h <= limit * (1 + 1e-12) for h, limit in zip(held, limits, strict=True))


def latency(instance: Instance, homes: Sequence[int]) -> float:
    """Return how long one sample takes alone.

    An accelerator runs its nodes in calls: a call starts when all it reads from elsewhere is made
    and the call before it is done; it moves that in, computes, moves out what others read, and only
    then is any of its results there. A node joins its device's last call unless it waits for
    something that waits for that call. CPUs are unlimited, take nodes one by one, and pay no
    transfer.

    Args:
        instance: forward nodes, in an order to run or not.
        homes: the device of every node.

    Source: Tarnawski et al., NeurIPS'20, section 5; there the calls are part of the plan.
    """
    called = _calls(instance, homes)
    done: dict[int, float] = {}
    free: dict[int, float] = {}
    for call in nx.lexicographical_topological_sort(called):
        members: list[int] = called.nodes[call]["members"]
        home = homes[members[0]]
        start = max([free.get(home, 0.0), *(done[before] for before in called.pred[call])])
        done[call] = start + _call_time(instance, set(members), home)
        if instance.transfer[instance.kind_of_device[home]]:
            free[home] = done[call]
    return max(done.values(), default=0.0)


def _calls(instance: Instance, homes: Sequence[int]) -> nx.DiGraph[int]:
    """Return the graph of calls; each knows its `members`."""
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(range(len(instance.nodes)))
    net.add_edges_from((a, b) for a, b, _ in instance.edges)
    called: nx.DiGraph[int] = nx.DiGraph()
    call_of: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nx.lexicographical_topological_sort(net):
        home = homes[node]
        before = sorted({call_of[maker] for maker in net.pred[node]})
        call = last.get(home, -1)
        others = [b for b in before if b != call]
        if call < 0 or any(nx.has_path(called, call, b) for b in others):
            call = len(called)
            called.add_node(call, members=[])
        called.nodes[call]["members"].append(node)
        called.add_edges_from((b, call) for b in before if b != call)
        call_of[node] = call
        if instance.transfer[instance.kind_of_device[home]]:
            last[home] = call
    return called


def _call_time(instance: Instance, members: set[int], home: int) -> float:
    kind = instance.kind_of_device[home]
    moved = {a: time for a, b, time in instance.edges if (a in members) != (b in members)}
    computed = sum(instance.nodes[node].times[kind] for node in members)
    return computed + instance.transfer[kind] * sum(moved.values())


# --------------------------------------------------------------------------- to a problem


def _grouped(instance: Instance) -> tuple[tuple[int, ...], nx.DiGraph[int]]:
    """Number the groups in an order to run; return them with the edges that they must run along.

    Forward edges order the groups. A group of backward nodes only has its place mirrored: what it
    reads from a later group's backward comes from there on the way back.
    """
    free = 1 + max((n.together for n in instance.nodes if n.together is not None), default=-1)
    nodes = enumerate(instance.nodes)
    group = [free + i if node.together is None else node.together for i, node in nodes]
    forward = {g for g, node in zip(group, instance.nodes, strict=True) if not node.backward}
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(dict.fromkeys(group))
    for maker, reader, _ in instance.edges:
        a, b = group[maker], group[reader]
        back = instance.nodes[maker].backward, instance.nodes[reader].backward
        if back == (False, False):
            net.add_edge(a, b)
        elif back == (True, True) and not (a in forward and b in forward):
            net.add_edge(b, a)
    component = {}
    for number, members in enumerate(nx.strongly_connected_components(net)):
        component.update(dict.fromkeys(members, number))
    first = {c: i for i, c in reversed(list(enumerate(component[g] for g in group)))}
    whole: nx.DiGraph[int] = nx.DiGraph()
    whole.add_nodes_from(first)
    whole.add_edges_from(
        (component[a], component[b]) for a, b in net.edges if component[a] != component[b]
    )
    order = nx.lexicographical_topological_sort(whole, key=first.__getitem__)
    place = {c: i for i, c in enumerate(order)}
    return tuple(place[component[g]] for g in group), nx.relabel_nodes(whole, place)


def _problem(instance: Instance) -> Problem:
    groups, order = _grouped(instance)
    nodes = instance.nodes
    readers: dict[int, set[int]] = defaultdict(set)
    time_of: dict[int, float] = {}
    for maker, reader, time in instance.edges:
        readers[maker].add(reader)
        time_of[maker] = max(time_of.get(maker, 0.0), time)
    nets = tuple(
        Net((maker, *sorted(read)), tuple(time_of[maker] * f for f in instance.transfer))
        for maker, read in sorted(readers.items())
    )
    plain = Problem(
        np.array([node.times for node in nodes]).T,
        np.array([node.nbytes for node in nodes]),
        (),
        nets,
        instance.kinds,
    )
    return replace(plain.merged(groups), edges=tuple(sorted(order.edges)))


# --------------------------------------------------------------------------- unlike devices


def unlike(instance: Instance, seed: int) -> Instance:
    """Return the instance with its accelerators made unlike: 2 or 3 types, 2 link speeds.

    Seeded. Each type is 1, 2 or 4 times slower, the first one not at all; its memory is what it
    was, or half of that when all nodes still fit into the sum; its links are as they were, or 4
    times slower, and at least one type has each. CPUs stay what they are.
    """
    dice = random.Random(f"{seed} {instance.name}")
    first, rest = instance.kinds[0], range(1, len(instance.kinds))
    types = min(first.count, dice.choice((2, 3)))
    counts = [first.count // types + (i < first.count % types) for i in range(types)]
    slower = [1.0, *(dice.choice((1.0, 2.0, 4.0)) for _ in range(types - 1))]
    wire = [1.0, *(dice.choice((1.0, 4.0)) for _ in range(types - 2)), 4.0][:types]
    total = sum(node.nbytes for node in instance.nodes)
    halves = [first.memory_bytes * dice.choice((1.0, 0.5)) for _ in range(types)]
    enough = sum(h * c for h, c in zip(halves, counts, strict=True)) >= 1.5 * total
    memory = halves if enough else [first.memory_bytes] * types
    made = [Kind(f"type{i}", counts[i], memory[i]) for i in range(types)]
    nodes = tuple(
        replace(n, times=(*(n.times[0] * s for s in slower), *(n.times[i] for i in rest)))
        for n in instance.nodes
    )
    return replace(
        instance,
        name=f"{instance.name}+unlike{seed}",
        nodes=nodes,
        kinds=(*made, *(instance.kinds[i] for i in rest)),
        transfer=(*(instance.transfer[0] * w for w in wire), *(instance.transfer[i] for i in rest)),
    )


# --------------------------------------------------------------------------- other instances


def varied(
    instance: Instance,
    accelerators: int | None = None,
    memory: float = 1.0,
    wires: float = 1.0,
) -> Instance:
    """Return the instance with another number of accelerators, other memory, other links.

    Args:
        instance: to change; returned as it is when nothing changes.
        accelerators: of the first kind.
        memory: factor of every limit.
        wires: factor of every transfer time.
    """
    count = accelerators or instance.kinds[0].count
    if count == instance.kinds[0].count and memory == 1 and wires == 1:
        return instance
    kinds = [replace(k, memory_bytes=k.memory_bytes * memory) for k in instance.kinds]
    return replace(
        instance,
        name=f"{instance.name}+k{count}x{memory:g}x{wires:g}",
        kinds=(replace(kinds[0], count=count), *kinds[1:]),
        edges=tuple((a, b, time * wires) for a, b, time in instance.edges),
    )


def stacked(instance: Instance, count: int) -> Instance:
    """Return copies of a forward pass in a row, cut off at so many nodes.

    What nobody reads in a copy is read by what reads nothing in the next; it costs what values of
    the copy cost in the middle. Memory grows with the nodes.

    Args:
        instance: without backward nodes.
        count: nodes wanted.
    """
    size = len(instance.nodes)
    copies = -(-count // size)
    readers, makers = {b for _, b, _ in instance.edges}, {a for a, _, _ in instance.edges}
    ends = [node for node in range(size) if node not in makers]
    starts = [node for node in range(size) if node not in readers]
    cost = sorted(time for _, _, time in instance.edges)[len(instance.edges) // 2]
    edges = [(a + size * c, b + size * c, t) for c in range(copies) for a, b, t in instance.edges]
    for copy in range(1, copies):
        shift = size * copy
        edges += [(end + shift - size, start + shift, cost) for end in ends for start in starts]
    colors = 1 + max((n.together for n in instance.nodes if n.together is not None), default=0)
    nodes = tuple(
        node if node.together is None else replace(node, together=node.together + copy * colors)
        for copy in range(copies)
        for node in instance.nodes
    )
    grown = count / size
    return replace(
        instance,
        name=f"{instance.name}+stack{count}",
        nodes=nodes[:count],
        edges=tuple(edge for edge in edges if max(edge[:2]) < count),
        kinds=tuple(replace(k, memory_bytes=k.memory_bytes * grown) for k in instance.kinds),
    )
