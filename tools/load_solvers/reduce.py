"""Problem -> a smaller one with the same best placement: nodes that may as well be one become one.

It knows loads; it knows no method. A placement of the smaller problem is one of the larger by
`Reduced.spread`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np

from tools.load_solvers.problem import Net, Problem


@dataclass(frozen=True)
class Reduced:
    """A smaller problem, and which of its nodes each node of the larger one went into."""

    problem: Problem
    group_of: tuple[int, ...]

    def spread(self, homes: Sequence[int]) -> tuple[int, ...]:
        """Return the homes of the larger problem's nodes."""
        return tuple(homes[group] for group in self.group_of)


def reduced(problem: Problem, bound: float = float("inf"), contiguous: bool = True) -> Reduced:
    """Make one of nodes that some best placement keeps together.

    - A node that takes no time and has one neighbour goes with it: elsewhere it saves nothing.
    - The nodes of a net that costs `bound` or more wherever it is cut stay together.

    Args:
        problem: what to place.
        bound: placements of this load or more are of no interest.
        contiguous: whether only contiguous placements count, so that what lies between two nodes
            of a device is with them; otherwise the order of the smaller problem may have cycles.
    """
    heavy = [net.members for net in problem.nets if _cut_costs(problem, net) >= bound]
    found = _contracted(problem, heavy, contiguous)
    while pairs := list(_idle(found.problem)):
        inner = _contracted(found.problem, pairs, contiguous)
        found = Reduced(inner.problem, tuple(inner.group_of[group] for group in found.group_of))
    return found


def shortened(problem: Problem, order: Sequence[int], most: int) -> Reduced:
    """Make one of nodes that follow each other in an order, so that `most` are left.

    Runs end where the values that would be cut there cost little.

    Args:
        problem: what to place.
        order: of its nodes, topological.
        most: nodes of the smaller problem.
    """
    count = problem.count
    if count <= most:
        return Reduced(problem, tuple(range(count)))
    place = {node: i for i, node in enumerate(order)}
    crossing = np.zeros(count + 1)
    for net in problem.nets:
        where = [place[node] for node in net.members]
        crossing[min(where) + 1] += max(net.times)
        crossing[max(where) + 1] -= max(net.times)
    at_cut = crossing.cumsum()
    edges = [round(i * count / most) for i in range(most + 1)]
    starts = {a + 1 + int(at_cut[a + 1 : b + 1].argmin()) for a, b in pairwise(edges) if a < b}
    number = np.zeros(count, dtype=np.intp)
    number[sorted(starts - {count})] = 1
    run = number.cumsum()
    group_of = tuple(int(run[place[node]]) for node in range(count))
    return Reduced(problem.merged(group_of), group_of)


def _cut_costs(problem: Problem, net: Net) -> float:
    """Return the least that the dearer of two devices pays when a net is cut between them."""
    costs = sorted(net.times[kind] for kind in problem.kind_of_device)
    return costs[1] if len(costs) > 1 else float("inf")


def _idle(problem: Problem) -> list[tuple[int, int]]:
    """List (node, its one neighbour) for nodes without time; no two of the pairs share a node."""
    roomy = problem.nbytes.sum() <= min(kind.memory_bytes for kind in problem.kinds)
    near: list[set[int]] = [set() for _ in range(problem.count)]
    pairs = [(net.members[0], reader) for net in problem.nets for reader in net.members[1:]]
    for a, b in (*problem.edges, *pairs):
        near[a].add(b)
        near[b].add(a)
    free = ~problem.times.any(axis=0) & (roomy | (problem.nbytes == 0))
    found: list[tuple[int, int]] = []
    taken: set[int] = set()
    for node in np.flatnonzero(free).tolist():
        if len(near[node]) == 1 and not taken & {node, *near[node]}:
            pair = (node, min(near[node]))
            found.append(pair)
            taken.update(pair)
    return found


def _contracted(problem: Problem, together: Iterable[Sequence[int]], contiguous: bool) -> Reduced:
    """Make one of nodes that must share a device, and of cycles that this brings about."""
    classes = nx.utils.UnionFind(range(problem.count))
    for members in together:
        classes.union(*members)
    if not contiguous:
        roots = dict.fromkeys(classes[node] for node in range(problem.count))
        number_of = {root: number for number, root in enumerate(roots)}
        plain = tuple(number_of[classes[node]] for node in range(problem.count))
        return Reduced(problem.merged(plain), plain)
    net: nx.DiGraph[int] = nx.DiGraph()
    net.add_nodes_from(classes[node] for node in range(problem.count))
    net.add_edges_from((classes[a], classes[b]) for a, b in problem.edges)
    component = {
        member: number
        for number, members in enumerate(nx.strongly_connected_components(net))
        for member in members
    }
    home = [component[classes[node]] for node in range(problem.count)]
    first = {c: i for i, c in reversed(list(enumerate(home)))}
    whole: nx.DiGraph[int] = nx.DiGraph()
    whole.add_nodes_from(first)
    whole.add_edges_from((home[a], home[b]) for a, b in problem.edges if home[a] != home[b])
    order = nx.lexicographical_topological_sort(whole, key=first.__getitem__)
    place = {c: i for i, c in enumerate(order)}
    groups = tuple(place[c] for c in home)
    return Reduced(problem.merged(groups), groups)
