"""The random walk of `partitioners.anneal` over public instances: the largest load is its cost.

Loads are kept up to date by what a move changes. It knows no graph and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import le

from partitioners.anneal import walked
from partitioners.neighbours import neighbours
from tools.load_solvers.problem import Problem

_SHARPNESS = 12  # of the smooth maximum: a p-norm, so that the second busiest device counts too


def sent_pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield who makes what a net sends, with each of its readers."""
    for net in problem.nets:
        yield from ((net.members[0], reader) for reader in net.members[1:])


def near_in(problem: Problem) -> list[list[int]]:
    """Return, for each node, those that it has an edge or a net's value in common with, sorted."""
    return neighbours(problem.count, (*problem.edges, *sent_pairs(problem)))


class Loads:
    """The loads of a placement, kept up to date move by move: mutable.

    Args:
        problem: what is placed.
        homes: the device of every node.
    """

    def __init__(self, problem: Problem, homes: Sequence[int]) -> None:
        self.problem, self.homes = problem, list(homes)
        kinds = problem.kind_of_device
        self._times = [
            [float(problem.times[kind, node]) for kind in kinds] for node in range(problem.count)
        ]
        self._wires = [[net.times[kind] for kind in kinds] for net in problem.nets]
        self._nbytes = [float(nbytes) for nbytes in problem.nbytes]
        self._limits = [problem.kinds[kind].memory_bytes * (1 + 1e-12) for kind in kinds]
        self._nets: list[list[int]] = [[] for _ in range(problem.count)]
        self._here = [[0] * len(kinds) for _ in problem.nets]
        self._parts = [0] * len(problem.nets)
        for number, net in enumerate(problem.nets):
            for node in net.members:
                self._nets[node].append(number)
                self._here[number][self.homes[node]] += 1
            self._parts[number] = sum(1 for count in self._here[number] if count)
        self.loads = [float(load) for load in problem.loads(homes)]
        self.held = [0.0] * len(kinds)
        for node, home in enumerate(self.homes):
            self.held[home] += self._nbytes[node]

    def move(self, node: int, to: int) -> None:
        """Put a node on another device."""
        at, loads = self.homes[node], self.loads
        if at == to:
            return
        self.homes[node] = to
        loads[at] -= self._times[node][at]
        loads[to] += self._times[node][to]
        self.held[at] -= self._nbytes[node]
        self.held[to] += self._nbytes[node]
        for net in self._nets[node]:
            here, wires = self._here[net], self._wires[net]
            self._leave(net, here, wires, at)
            self._enter(net, here, wires, to)

    def _leave(self, net: int, here: list[int], wires: list[float], at: int) -> None:
        here[at] -= 1
        if here[at]:
            return
        self._parts[net] -= 1
        if self._parts[net]:
            self.loads[at] -= wires[at]
        if self._parts[net] == 1:  # the one that is left need not send any more
            left = next(device for device, count in enumerate(here) if count)
            self.loads[left] -= wires[left]

    def _enter(self, net: int, here: list[int], wires: list[float], to: int) -> None:
        here[to] += 1
        if here[to] > 1:
            return
        self._parts[net] += 1
        if self._parts[net] > 1:
            self.loads[to] += wires[to]
        if self._parts[net] == 2:  # the one that had it all begins to send
            had = next(device for device, count in enumerate(here) if count and device != to)
            self.loads[had] += wires[had]

    def runs(self, node: int, to: int) -> bool:
        """Whether a device can run a node."""
        return self._times[node][to] != inf

    def fits(self) -> bool:
        """Whether every device can hold what it has."""
        return all(map(le, self.held, self._limits))

    def value(self) -> float:
        """Return the largest load."""
        return max(self.loads)

    def busiest(self) -> int:
        """Return the device with the largest load."""
        return self.loads.index(max(self.loads))

    def energy(self) -> float:
        """Return a p-norm of the loads: a little more than the largest."""
        top = max(self.loads)
        if top <= 0:
            return 0.0
        total = sum([(load / top) ** _SHARPNESS for load in self.loads if load > 0])
        return float(top * total ** (1 / _SHARPNESS))


def improved(problem: Problem, homes: Sequence[int], steps: int, seed: int = 0) -> tuple[int, ...]:
    """Return a placement that is no worse than the one given, and fits if that does.

    Args:
        problem: what is placed.
        homes: where to start.
        steps: how many moves are tried; some 50,000 a second.
        seed: of the walk; equal seeds give equal placements.
    """
    if len(problem.kind_of_device) < 2 or problem.count < 2:
        return tuple(homes)
    return walked(Loads(problem, homes), near_in(problem), len(problem.kind_of_device), steps, seed)
