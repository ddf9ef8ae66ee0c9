"""Placement of a problem -> a better one, contiguous or not, by a seeded random walk.

Markov chain Monte Carlo as in FlexFlow (Jia et al., MLSys'19, section 6.2); pieces of the graph are
moved as a whole, because single nodes that are dear to cut off never leave. What it walks over, and
what is to be least, is a `State`; `Loads` is the one of the public instances, with the largest load
for its cost, kept up to date by what a move changes. It knows no graph and no files.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, inf
from operator import le
from typing import Protocol

from partitioners.neighbours import grown, near_in
from partitioners.problem import Problem

_SHARPNESS = 12  # of the smooth maximum: a p-norm, so that the second busiest device counts too
_LARGEST_PIECES = (1, 1, 1, 2, 2, 4, 8, 16, 32)
_SWAPS = 0.25
_BORDER_TRIES = 30  # draws of a node at a border before any will do
_HOT, _COLD = 0.03, 0.0001  # temperature at first and last, in shares of the load


class State(Protocol):
    """A placement that is changed move by move: what a walk goes over."""

    homes: list[int]

    def move(self, node: int, to: int) -> None:
        """Put a node on another device."""
        ...

    def runs(self, node: int, to: int) -> bool:
        """Whether a device can run a node."""
        ...

    def fits(self) -> bool:
        """Whether every device can hold what it has."""
        ...

    def energy(self) -> float:
        """Return what a move is accepted by: about the value, but without its plateaus."""
        ...

    def value(self) -> float:
        """Return what is to be least."""
        ...

    def busiest(self) -> int:
        """Return the device that has most to do."""
        ...


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


def walked(
    state: State,
    near: Sequence[Sequence[int]],
    devices: int,
    steps: int,
    seed: int = 0,
    heat: tuple[float, float] = (_HOT, _COLD),
    borders: bool = False,
) -> tuple[int, ...]:
    """Return the best placement of a walk; the first one if nothing better that fits was met.

    Args:
        state: where to start; it is changed.
        near: per node: those it hangs together with.
        devices: how many there are, at least 2.
        steps: how many moves are tried.
        seed: of the walk; equal seeds give equal placements.
        heat: temperature at first and last, in shares of the energy.
        borders: move mostly nodes that hang together with some on another device.
    """
    walk = _Walk(state, near, devices, random.Random(seed), borders)
    hot, cold = heat
    for step in range(steps):
        walk.step(hot * (cold / hot) ** (step / steps))
    return walk.best


class _Walk:
    """A random walk over placements: mutable, used once."""

    def __init__(
        self,
        state: State,
        near: Sequence[Sequence[int]],
        devices: int,
        dice: random.Random,
        borders: bool = False,
    ) -> None:
        self.state, self.dice = state, dice
        self.best = tuple(state.homes)
        self._least = state.value()
        self._energy = state.energy()
        self._devices = devices
        self._near = near
        self._tries = _BORDER_TRIES if borders else 0

    def step(self, heat: float) -> None:
        """Try one move."""
        state, homes = self.state, self.state.homes
        moves = self._swap() if self.dice.random() < _SWAPS else self._shift()
        if not all(state.runs(node, to) for node, to in moves):
            return
        back = [(node, homes[node]) for node, _ in moves]
        for node, to in moves:
            state.move(node, to)
        energy = state.energy()
        if not (state.fits() and self._accepts(energy, heat)):
            for node, origin in back:
                state.move(node, origin)
            return
        self._energy = energy
        if state.value() < self._least * (1 - 1e-12):
            self._least = state.value()
            self.best = tuple(homes)

    def _accepts(self, energy: float, heat: float) -> bool:
        worse = energy - self._energy
        return worse <= 0 or self.dice.random() < exp(-worse / max(heat * self._energy, 1e-300))

    def _shift(self) -> list[tuple[int, int]]:
        """Draw nodes of one device that hang together, and a device to move them to.

        Mostly a device of a neighbour of theirs; now and then any.
        """
        dice, homes = self.dice, self.state.homes
        first = dice.randrange(len(homes))
        for _ in range(self._tries):
            if any(homes[other] != homes[first] for other in self._near[first]):
                break
            first = dice.randrange(len(homes))
        at = homes[first]
        piece = grown(self._near, homes, first, dice.choice(_LARGEST_PIECES), dice)
        around = [homes[other] for node in piece for other in self._near[node]]
        others = [home for home in around if home != at]
        if others and dice.random() < 0.9:
            to = others[dice.randrange(len(others))]
        else:
            to = dice.randrange(self._devices - 1)
            to += to >= at
        return [(node, to) for node in piece]

    def _swap(self) -> list[tuple[int, int]]:
        """Draw a node of the busiest device and one of another, to change places."""
        dice, homes, top = self.dice, self.state.homes, self.state.busiest()
        mine = [node for node, home in enumerate(homes) if home == top]
        other = dice.randrange(len(homes))
        if not mine or homes[other] == top:
            return []
        return [(mine[dice.randrange(len(mine))], homes[other]), (other, top)]
