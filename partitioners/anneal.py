"""A placement -> a better one, contiguous or not, by a seeded random walk over any `Walkable`.

Markov chain Monte Carlo as in FlexFlow (Jia et al., MLSys'19, section 6.2); pieces of the graph are
moved as a whole, because single nodes that are dear to cut off never leave. What it walks over, and
what is to be least, is the state's; it knows no graph and no cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp
from typing import Protocol

from partitioners.neighbours import grown

_LARGEST_PIECES = (1, 1, 1, 2, 2, 4, 8, 16, 32)
_SWAPS = 0.25
_BORDER_TRIES = 30  # draws of a node at a border before any will do
_HOT, _COLD = 0.03, 0.0001  # temperature at first and last, in shares of the load


class Walkable(Protocol):
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


def walked(
    state: Walkable,
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
    walk = _Annealing(state, near, devices, random.Random(seed), borders)
    hot, cold = heat
    for step in range(steps):
        walk.step(hot * (cold / hot) ** (step / steps))
    return walk.best


class _Annealing:
    """A random walk over placements: mutable, used once."""

    def __init__(
        self,
        state: Walkable,
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
