"""Problem -> the placement of least maximum load, contiguous or not, with a bound that is proven.

The objective of the public instances (`Problem.loads`) as an integer program for CP-SAT. It knows
no graph, no schedule and no files.

Source: Tarnawski et al., NeurIPS'20, section 5 (the throughput program, without contiguity).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigbrain_fx.errors import NoPlanError
from partitioners.sat import FINENESS, Variable, cp_model, solved
from tools.load_solvers.contiguous import best_contiguous
from tools.load_solvers.load_bound import load_bound
from tools.load_solvers.problem import Net, Problem
from tools.load_solvers.reduce import reduced

WORK = 60.0
_QUICK_IDEALS = 3000  # a start need not be proven


@dataclass(frozen=True)
class Proven:
    """A placement, its largest load, and what no placement's largest load is below."""

    homes: tuple[int, ...]
    load: float
    bound: float

    @property
    def gap(self) -> float:
        """How much smaller the best load can be at most, as a share of this one."""
        return max(0.0, 1.0 - self.bound / self.load) if self.load else 0.0


def least_load(
    problem: Problem, start: Sequence[int] | None = None, work: float = WORK, seed: int = 0
) -> Proven | None:
    """Return a placement of least maximum load, as far as the work allows; None: nothing fits.

    Args:
        problem: what to place.
        start: a placement that fits, to begin with; else the best contiguous one of few ideals.
        work: limit, in deterministic seconds; about seconds of one core.
        seed: of the search.

    Raises:
        InputError: OR-tools is not installed.
    """
    cp_model()
    if start is None:
        found = best_contiguous(problem, _QUICK_IDEALS)
        start = found.homes if found else None
    try:
        least = load_bound(problem)
    except NoPlanError:
        return None
    most = problem.max_load(start) if start is not None else _everything(problem)
    if start is not None and most <= least * (1 + 1e-9):
        return Proven(tuple(start), most, min(least, most))
    smaller = reduced(problem, most * (1 + 1e-9), contiguous=False)
    first = None
    if start is not None:
        first = [0] * smaller.problem.count
        for node, group in enumerate(smaller.group_of):
            first[group] = start[node]
        if smaller.spread(first) != tuple(start):
            first = None  # a start that parts what a best placement keeps together
    program = _Program(smaller.problem, most, least)
    answer = solved(program.model, program.wanted(), program.hints(first), work, seed)
    least = max(least, answer.bound / program.scale)
    homes = None if start is None else tuple(start)
    if answer.values is not None:
        other = smaller.spread(program.homes(answer.values))
        if problem.fits(other) and (homes is None or problem.max_load(other) < most):
            homes = other
    if homes is None:
        return None
    load = problem.max_load(homes)
    return Proven(homes, load, min(least, load))


def _everything(problem: Problem) -> float:
    """Return a load that no placement exceeds."""
    finite = np.where(np.isfinite(problem.times), problem.times, 0.0)
    return float(finite.max(axis=0).sum() + sum(max(net.times) for net in problem.nets))


class _Program:
    """The integer program; costs are rounded down, so that its bound is one of the problem.

    Args:
        problem: what to place.
        most: loads above this are of no interest.
        least: loads below this are impossible.
    """

    def __init__(self, problem: Problem, most: float, least: float) -> None:
        self.problem, self.model = problem, cp_model().CpModel()
        self.scale = FINENESS / most if most > 0 else 1.0
        self._kinds = problem.kind_of_device
        self._devices = range(len(self._kinds))
        self.load = self.model.new_int_var(
            self._whole(least), self._whole(most) + 1, "largest load"
        )
        self.runs = [self._node(node) for node in range(problem.count)]
        paid = [self._net(net) for net in problem.nets]
        for device in self._devices:
            self._limit_load(device, paid)
            self._limit_memory(device)
        self._break_symmetry()
        self.model.minimize(self.load)

    def wanted(self) -> list[Variable]:
        """Return a variable for each node and device where it can run."""
        return [each[device] for each in self.runs for device in sorted(each)]

    def homes(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the device of every node from the values of `wanted`."""
        left = iter(values)
        return tuple(
            max(sorted(each), key={device: next(left) for device in sorted(each)}.__getitem__)
            for each in self.runs
        )

    def hints(self, homes: Sequence[int] | None) -> dict[Variable, int]:
        """Return a placement as hints; devices of a kind in the order in which they are used."""
        if homes is None:
            return {}
        renamed = self._in_order(homes)
        return {
            each[device]: int(renamed[node] == device)
            for node, each in enumerate(self.runs)
            for device in sorted(each)
        }

    def _in_order(self, homes: Sequence[int]) -> list[int]:
        free = {k: [d for d in self._devices if self._kinds[d] == k] for k in set(self._kinds)}
        name: dict[int, int] = {}
        for home in homes:
            if home not in name:
                name[home] = free[self._kinds[home]].pop(0)
        return [name[home] for home in homes]

    def _whole(self, cost: float) -> int:
        return int(cost * self.scale)

    def _node(self, node: int) -> dict[int, Variable]:
        times = self.problem.times
        each = {
            device: self.model.new_bool_var(f"{node} on {device}")
            for device in self._devices
            if np.isfinite(times[self._kinds[device], node])
        }
        self.model.add_exactly_one(each.values())
        return each

    def _net(self, net: Net) -> dict[int, Variable]:
        """Return, for each device that would pay, whether the net crosses its boundary."""
        maker = net.members[0]
        found: dict[int, Variable] = {}
        for device in self._devices:
            if not self._whole(net.times[self._kinds[device]]):
                continue
            paid = found[device] = self.model.new_bool_var("")
            for reader in net.members[1:]:
                self._implies_paid(maker, reader, device, paid)
                self._implies_paid(reader, maker, device, paid)
        return found

    def _implies_paid(self, here: int, there: int, device: int, paid: Variable) -> None:
        """Require: one of the two on the device and the other not, then the net is paid for."""
        if device in self.runs[here]:
            other = [self.runs[there][device]] if device in self.runs[there] else []
            self.model.add_bool_or([~self.runs[here][device], *other, paid])

    def _limit_load(self, device: int, paid: Sequence[dict[int, Variable]]) -> None:
        kind = self._kinds[device]
        terms = [
            self._whole(float(self.problem.times[kind, node])) * each[device]
            for node, each in enumerate(self.runs)
            if device in each
        ]
        terms += [
            self._whole(net.times[kind]) * each[device]
            for net, each in zip(self.problem.nets, paid, strict=True)
            if device in each
        ]
        self.model.add(sum(terms) <= self.load)

    def _limit_memory(self, device: int) -> None:
        limit, total = (
            self.problem.kinds[self._kinds[device]].memory_bytes,
            self.problem.nbytes.sum(),
        )
        if total <= limit:
            return
        scale = FINENESS * 64 / total
        terms = [
            int(self.problem.nbytes[node] * scale) * each[device]
            for node, each in enumerate(self.runs)
            if device in each
        ]
        self.model.add(sum(terms) <= int(limit * scale))

    def _break_symmetry(self) -> None:
        """Use the devices of a kind in order: a node goes to one only after one on that before."""
        for device in self._devices[1:]:
            if self._kinds[device - 1] != self._kinds[device]:
                continue
            used: Variable = None  # whether a node so far is on the device before
            for node, each in enumerate(self.runs):
                if device in each:
                    self.model.add_bool_or([~each[device], *([] if used is None else [used])])
                used = self._or(used, self.runs[node].get(device - 1))

    def _or(self, a: Variable | None, b: Variable | None) -> Variable:
        if a is None or b is None:
            return b if a is None else a
        found = self.model.new_bool_var("")
        self.model.add_bool_or([a, b, ~found])
        return found
