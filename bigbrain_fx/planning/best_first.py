"""Sequences of devices x limits on the busiest -> the best split, and those met on the way.

Best-first over intervals of `most_s`, for all sequences at once. In an interval (low, high) no step
is shorter than (least sum under `high`) + (M - 1) low; the one with the least bound is halved next,
until that bound is within a gap of the best split found. It knows no units and no memory: who
solves one sequence for one limit is a `Solver`.

Source: Alpa (Zheng et al., OSDI'22, section 5.2) scans the limits; here the search proves its gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple, Protocol

from bigbrain_fx.planning.chain import Split

_ROUNDING = 1e-12
_NARROW = 1e-9  # an interval of no width: well above what solvers round by


class Solver(Protocol):
    """All splits for one sequence of devices.

    Attributes:
        steps: stages solved so far; those that sequences share count for each.
    """

    steps: int

    @property
    def micro_batches(self) -> int:
        """How many a step has."""
        ...

    def solve(self, sequence: Sequence[str], limit_s: float) -> Split | None:
        """Return the split of least `sum_s` with `most_s` <= `limit_s`; None: there is none."""
        ...

    def least_busy_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `most_s`."""
        ...

    def least_sum_s(self, sequence: Sequence[str]) -> float:
        """Return a lower bound of `sum_s`."""
        ...


class _Open(NamedTuple):
    """An interval of `most_s` in which no step is below the bound; no end: nothing is solved."""

    bound_s: float
    number: int
    low_s: float
    high_s: float
    sum_s: float
    sequence: Sequence[str]


class BestFirst:
    """One search: mutable; `run` again without sequences goes on where it stopped.

    Args:
        solver: the units in one order, or in every order.
        best: a split that is known already; what cannot be better is not looked at.

    Attributes:
        best: the split of least step, of those met and that one.
        met: every split, by sequence and cuts, in the order in which they were met.
        compared: how many times a sequence was solved or an interval halved.
    """

    def __init__(self, solver: Solver, best: Split | None = None) -> None:
        self.solver, self.best, self.compared = solver, best, 0
        self.met: dict[tuple[tuple[str, ...], tuple[int, ...]], Split] = {}
        self._more = solver.micro_batches - 1
        self._heap: list[_Open] = []

    def run(
        self, sequences: Iterable[Sequence[str]], gap: float, most_steps: int, eager_steps: int = 0
    ) -> None:
        """Search.

        Args:
            sequences: the devices along the pipeline, the best looking first.
            gap: 0.001: to a thousandth.
            most_steps: stages that may be solved; reaching it is no error.
            eager_steps: of these, for the best split of each sequence, whatever its bound; what
                comes after is left out. 0: a sequence is solved when its bound is the least.
        """
        for sequence in sequences:
            low_s = self.solver.least_busy_s(sequence)
            if self.solver.steps < eager_steps:
                self._solve(low_s, inf, sequence)
            elif not eager_steps:
                self._open(low_s, inf, self.solver.least_sum_s(sequence), sequence)
        while self._heap and self.solver.steps < most_steps and not self._is_proven(gap):
            top = heapq.heappop(self._heap)
            if top.high_s == inf:
                self._solve(top.low_s, inf, top.sequence)
            elif top.high_s > top.low_s * (1 + _NARROW):  # else the split known is the best there
                middle_s = (top.low_s + top.high_s) / 2
                self._solve(top.low_s, middle_s, top.sequence)
                self._open(middle_s, top.high_s, top.sum_s, top.sequence)

    def _is_proven(self, gap: float) -> bool:
        return self.best is not None and self._heap[0].bound_s >= self._step_s(self.best) * (
            1 - gap - _ROUNDING
        )

    def _step_s(self, split: Split) -> float:
        return split.sum_s + self._more * split.most_s

    def _solve(self, low_s: float, limit_s: float, sequence: Sequence[str]) -> None:
        split = self.solver.solve(sequence, limit_s)
        if split is None:
            return
        self.met.setdefault((split.sequence, split.cuts), split)
        if self.best is None or self._step_s(split) < self._step_s(self.best) * (1 - _ROUNDING):
            self.best = split
        self._open(low_s, split.most_s, split.sum_s, sequence)

    def _open(self, low_s: float, high_s: float, sum_s: float, sequence: Sequence[str]) -> None:
        self.compared += 1
        bound_s = sum_s + self._more * low_s
        entry = _Open(bound_s, self.compared, low_s, high_s, sum_s, sequence)
        heapq.heappush(self._heap, entry)
