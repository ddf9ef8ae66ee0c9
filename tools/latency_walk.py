"""Placement of an instance -> one with which one sample takes less time, by a seeded random walk.

Pieces that hang together are moved as a whole, as in `partitioners.anneal`; the cost is the latency
of `tools.calls`, worked out anew for each move. Work is counted in such evaluations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp

from partitioners.neighbours import grown
from tools.calls import Calls
from tools.instances import Instance
from tools.load_solvers.loads import near_in
from tools.load_solvers.problem import Problem

_LARGEST_PIECES = (1, 1, 1, 2, 2, 4, 8, 16, 32, 64)
_HOT, _COLD = 0.02, 0.0002  # temperature at first and last, in shares of the latency


def sooner(
    instance: Instance, homes: Sequence[int], evaluations: int, seed: int = 0
) -> tuple[int, ...]:
    """Return a placement that is no worse than the one given, and fits if that does.

    Args:
        instance: what is placed.
        homes: where to start: the device of every node of `instance.problem`.
        evaluations: how many moves are tried.
        seed: of the walk; equal seeds give equal placements.
    """
    walk = _Walk(instance, homes, random.Random(seed))
    for step in range(evaluations):
        walk.step(_HOT * (_COLD / _HOT) ** (step / evaluations))
    return walk.best


class _Walk:
    """A random walk over placements: mutable, used once."""

    def __init__(self, instance: Instance, homes: Sequence[int], dice: random.Random) -> None:
        self.instance, self.dice = instance, dice
        self.problem: Problem = instance.problem
        self.calls = Calls(instance)
        self.homes, self.best = list(homes), tuple(homes)
        self.now = self.least = self.calls.latency(instance.spread(homes))
        kinds = self.problem.kind_of_device
        self._limits = [self.problem.kinds[kind].memory_bytes * (1 + 1e-12) for kind in kinds]
        self._nbytes = [float(nbytes) for nbytes in self.problem.nbytes]
        self.held = [0.0] * len(kinds)
        for node, home in enumerate(homes):
            self.held[home] += self._nbytes[node]
        self._times = self.problem.times[list(kinds)].T.tolist()
        self._near = near_in(self.problem)

    def step(self, heat: float) -> None:
        """Try one move."""
        moves = self._swap() if self.dice.random() < 0.15 else self._shift()
        back = [(node, self.homes[node]) for node, _ in moves]
        if not moves or not self._possible(moves):
            return
        self._apply(moves)
        taken = self.calls.latency(self.instance.spread(self.homes))
        worse = taken - self.now
        if worse > 0 and self.dice.random() >= exp(-worse / max(heat * self.now, 1e-300)):
            self._apply(back)
            return
        self.now = taken
        if taken < self.least * (1 - 1e-12):
            self.least, self.best = taken, tuple(self.homes)

    def _apply(self, moves: Sequence[tuple[int, int]]) -> None:
        for node, to in moves:
            self.held[self.homes[node]] -= self._nbytes[node]
            self.held[to] += self._nbytes[node]
            self.homes[node] = to

    def _possible(self, moves: Sequence[tuple[int, int]]) -> bool:
        """Whether the devices can run and hold what they get."""
        change: dict[int, float] = {}
        for node, to in moves:
            if self._times[node][to] == float("inf"):
                return False
            change[to] = change.get(to, 0.0) + self._nbytes[node]
            home = self.homes[node]
            change[home] = change.get(home, 0.0) - self._nbytes[node]
        return all(self.held[d] + more <= self._limits[d] for d, more in change.items())

    def _shift(self) -> list[tuple[int, int]]:
        dice, homes = self.dice, self.homes
        first = dice.randrange(len(homes))
        at = homes[first]
        piece = grown(self._near, homes, first, dice.choice(_LARGEST_PIECES), dice)
        around = [homes[other] for node in piece for other in self._near[node]]
        others = [home for home in around if home != at]
        if others and dice.random() < 0.7:
            to = others[dice.randrange(len(others))]
        else:
            to = dice.randrange(len(self.held))
        return [(node, to) for node in piece] if to != at else []

    def _swap(self) -> list[tuple[int, int]]:
        """Draw two pieces on different devices, to change places."""
        dice, homes = self.dice, self.homes
        one, other = dice.randrange(len(homes)), dice.randrange(len(homes))
        if homes[one] == homes[other]:
            return []
        a, b = homes[one], homes[other]
        most = dice.choice(_LARGEST_PIECES)
        there = [(node, b) for node in grown(self._near, homes, one, most, dice)]
        return there + [(node, a) for node in grown(self._near, homes, other, most, dice)]
