"""Problem and one topological order -> the best cut of it by largest or total load, all pieces.

What `contiguous` is for ideals, this is for one order, where the load of every piece comes from
sums over rectangles: n x n numbers in all, so it serves long chains. It knows no files and no
schedule; the load of a device is as in `Problem.loads`.

Source: the linearised dynamic program of Tarnawski et al., NeurIPS'20 (`DPL` in their code), with
devices counted per kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tools.load_solvers.problem import Problem, Times

Objective: TypeAlias = Literal["max", "sum"]
_Indices = NDArray[np.intp]
_Piece = NDArray[np.float64]  # [after the last node, first node]
_State = tuple[int, ...]  # how many devices of each kind are in use


def best_cut(
    problem: Problem, order: Sequence[int], objective: Objective = "max"
) -> tuple[tuple[int, ...], float] | None:
    """Return the homes and the objective of the best contiguous pieces; None: nothing fits.

    Args:
        problem: what to place.
        order: of all its nodes, topological.
        objective: the largest load, or the sum of loads.
    """
    return _Cut(problem, order, objective).run()


class _Cut:
    """The dynamic program: least[state][i] is the least objective for the first i nodes."""

    def __init__(self, problem: Problem, order: Sequence[int], objective: Objective) -> None:
        self.problem, self.order = problem, np.asarray(order, dtype=np.intp)
        self._adds = objective == "sum"
        self._loads = piece_loads(problem, order)
        self.least: dict[_State, Times] = {}
        self.best_from: dict[_State, tuple[_Indices, _Indices]] = {}

    def run(self) -> tuple[tuple[int, ...], float] | None:
        """Fill the states from no device to all of them; follow the best one back."""
        counts = [range(kind.count + 1) for kind in self.problem.kinds]
        states = sorted(product(*counts), key=lambda s: (sum(s), s))
        for state in states:
            self._fill(state)
        load, _, state = min((float(self.least[s][-1]), sum(s), s) for s in states)
        return (self._homes(state), load) if np.isfinite(load) else None

    def _fill(self, state: _State) -> None:
        count = self.problem.count
        least = np.full(count + 1, np.inf)
        source, kind_of = np.zeros(count + 1, np.intp), np.zeros(count + 1, np.intp)
        if not any(state):
            least[0] = 0.0
        for kind, used in enumerate(state):
            if not used:
                continue
            known = self.least[_one_less(state, kind)][None, :-1]
            loads = self._loads[kind]
            both = loads + known if self._adds else np.maximum(loads, known)
            best = both.argmin(axis=1)
            load = both[np.arange(count), best]
            better = np.flatnonzero(load < least[1:]) + 1
            least[better], source[better] = load[better - 1], best[better - 1]
            kind_of[better] = kind
        self.least[state], self.best_from[state] = least, (source, kind_of)

    def _homes(self, state: _State) -> tuple[int, ...]:
        """Follow the choices back; devices are numbered kind by kind."""
        firsts = np.cumsum([0, *(kind.count for kind in self.problem.kinds)])
        homes = np.zeros(self.problem.count, dtype=np.intp)
        at = self.problem.count
        while any(state):
            source, kind_of = self.best_from[state]
            kind, origin = int(kind_of[at]), int(source[at])
            homes[self.order[origin:at]] = firsts[kind] + state[kind] - 1
            state, at = _one_less(state, kind), origin
        return tuple(int(home) for home in homes)


def _one_less(state: _State, kind: int) -> _State:
    return tuple(used - (k == kind) for k, used in enumerate(state))


def piece_loads(problem: Problem, order: Sequence[int]) -> list[_Piece]:
    """Return, per kind, [after - 1, first] -> the load of a piece; infinite where it cannot run."""
    count = problem.count
    index = np.asarray(order, dtype=np.intp)
    corners = _corners(problem, order)
    found: list[_Piece] = []
    no_piece = np.tri(count, count, -1, dtype=bool).T
    held = np.concatenate(([0.0], np.cumsum(problem.nbytes[index])))
    for kind, devices in enumerate(problem.kinds):
        times = problem.times[kind][index]
        runs = np.isfinite(times)
        until = np.concatenate(([0.0], np.cumsum(np.where(runs, times, 0.0))))
        loads = until[1:, None] - until[None, :-1]
        if np.any(corners[2][kind]):
            loads += _summed(count, corners[0], corners[1], corners[2][kind])
        loads[no_piece] = np.inf
        if not runs.all():
            bad = np.concatenate(([0], np.cumsum(~runs)))
            loads[bad[1:, None] > bad[None, :-1]] = np.inf
        if held[-1] > devices.memory_bytes:
            limit = devices.memory_bytes * (1 + 1e-12)
            loads[held[1:, None] - held[None, :-1] > limit] = np.inf
        found.append(loads)
    return found


def _corners(problem: Problem, order: Sequence[int]) -> tuple[_Indices, _Indices, Times]:
    """Return where the sums of what crosses change: rows (after), columns (first), [kind, amount].

    A piece pays for a value when it has one of its nodes, but not all. Pieces whose first one is
    the t-th in the order begin after the one before it, and end after it.
    """
    place = np.empty(problem.count, dtype=np.intp)
    place[np.asarray(order, dtype=np.intp)] = np.arange(problem.count)
    rows: list[int] = []
    columns: list[int] = []
    nets: list[int] = []
    signs: list[float] = []

    def add(row: int, column: int, net: int, sign: float) -> None:
        rows.append(row)
        columns.append(column)
        nets.append(net)
        signs.append(sign)

    for number, net in enumerate(problem.nets):
        where = sorted({int(place[node]) for node in net.members})
        before = -1
        for at in where:  # first in before + 1 .. at, after - 1 from at on
            add(at, before + 1, number, 1.0)
            add(at, at + 1, number, -1.0)
            before = at
        add(where[-1], 0, number, -1.0)  # all of them
        add(where[-1], where[0] + 1, number, 1.0)
    wires = np.array([net.times for net in problem.nets]).reshape(-1, len(problem.kinds))
    amounts = wires[np.array(nets, dtype=np.intp)].T * np.array(signs)[None, :]
    return np.array(rows, dtype=np.intp), np.array(columns, dtype=np.intp), amounts


def _summed(count: int, rows: _Indices, columns: _Indices, amounts: Times) -> Times:
    found = np.zeros((count + 1, count + 1))
    np.add.at(found, (rows, columns), amounts)
    np.cumsum(found, axis=0, out=found)
    np.cumsum(found, axis=1, out=found)
    return found[:count, :count]
