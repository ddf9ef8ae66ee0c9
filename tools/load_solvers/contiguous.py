"""Problem -> the contiguous placement of least maximum (or total) load, over a set of ideals.

With all ideals it is the optimum; with the beginnings of a few topological orders it is the best of
those, in a moment, and a bound that keeps the search over all of them small. It knows no files, and
no schedule: the load of a device is as in `Problem.loads`.

Source: Tarnawski et al., NeurIPS'20, section 4, dp[ideal][devices used]; devices are counted per
kind here, the load of a piece comes from a matrix product over the states of each net, and pieces
that cannot be part of a placement under the bound are never looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Literal, TypeAlias

import numpy as np

from bigbrain_fx.planning.orders import depth_first, unit_orders
from partitioners.ideals import Indices, Sets, ideals, prefixes, states, within
from tools.load_solvers.chain_load import best_cut
from tools.load_solvers.problem import Problem, Times
from tools.load_solvers.reduce import reduced, shortened

MOST_IDEALS = 40_000
MOST_CUTS = 1200  # of more nodes, runs of neighbours are made one
_FEW_NODES = 250
_MANY = 2500  # ideals that are looked at where there are too many to list
_ROUNDING = 1 + 1e-9
_CHUNK = 512
Objective: TypeAlias = Literal["max", "sum"]
_State = tuple[int, ...]  # how many devices of each kind are in use


@dataclass(frozen=True)
class Contiguous:
    """A contiguous placement: its home per node, its objective, and what is known of it.

    `load` is the largest load, or the sum of loads. `proven` means: no contiguous placement has a
    smaller one.
    """

    homes: tuple[int, ...]
    load: float
    proven: bool
    ideals: int


def best_contiguous(
    problem: Problem, most_ideals: int = MOST_IDEALS, objective: Objective = "max"
) -> Contiguous | None:
    """Return the contiguous placement of least maximum load; None when nothing fits.

    Args:
        problem: what to place. Not all devices need be used.
        most_ideals: when there are more, the beginnings of a few orders stand for all.
        objective: "max": the time per sample of a full pipeline; "sum": what one sample takes
            alone, when pieces run one after another.
    """
    if problem.count == 0:
        return Contiguous((), 0.0, True, 1)
    plain = reduced(problem)
    inner = plain.problem
    orders = unit_orders(inner.count, inner.edges)
    start = _cut(inner, orders, objective)
    bound = start[1] if start else np.inf
    if most_ideals <= 1:
        return start and Contiguous(plain.spread(start[0]), bound, False, 3 * inner.count)
    found = _over_ideals(inner, bound, most_ideals, objective)
    if found is None:
        return start and Contiguous(plain.spread(start[0]), bound, False, 3 * inner.count)
    if not found.homes:
        return start and Contiguous(plain.spread(start[0]), bound, found.proven, found.ideals)
    return replace(found, homes=plain.spread(found.homes))


def _cut(
    problem: Problem, orders: Sequence[Sequence[int]], objective: Objective
) -> tuple[tuple[int, ...], float] | None:
    """Return the best cut of a few orders: of a small problem, from one into another as well."""
    if problem.count <= _FEW_NODES:
        return _Search(problem, prefixes(orders), np.inf, objective).run()
    best: tuple[tuple[int, ...], float] | None = None
    for order in orders:
        smaller = shortened(problem, order, MOST_CUTS)
        place = {node: i for i, node in enumerate(order)}
        first = [problem.count] * smaller.problem.count
        for node, group in enumerate(smaller.group_of):
            first[group] = min(first[group], place[node])
        runs = sorted(range(smaller.problem.count), key=first.__getitem__)
        found = best_cut(smaller.problem, runs, objective)
        if found is not None and (best is None or found[1] < best[1]):
            best = smaller.spread(found[0]), found[1]
    return best


def _over_ideals(
    problem: Problem, bound: float, most_ideals: int, objective: Objective
) -> Contiguous | None:
    """Return the best placement under a bound, over all ideals; without homes: there is none.

    Where there are too many ideals to list, some of them stand for all; None: not looked at.
    """
    smaller = reduced(problem, bound)
    count = smaller.problem.count
    most = int(most_ideals * min(1.0, _FEW_NODES / count) ** 2)
    every = ideals(count, smaller.problem.edges, most) if count < most else None
    if every is None and count > _FEW_NODES:
        return None
    sets = _many(smaller.problem) if every is None else every
    found = _Search(smaller.problem, sets, bound, objective).run()
    homes, load = found or ((), bound)
    return Contiguous(smaller.spread(homes) if homes else (), load, every is not None, len(sets))


def _many(problem: Problem) -> Sets:
    """Return the beginnings of as many seeded orders as make `_MANY` sets."""
    orders = islice(_random_orders(problem.count, problem.edges), max(3, _MANY // problem.count))
    return prefixes((*unit_orders(problem.count, problem.edges), *orders))


def _random_orders(count: int, edges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Yield topological orders without end, each depth first from one end or the other; seeded."""
    dice = random.Random(0)
    pairs = sorted(set(edges))
    starts = list(range(count))
    while True:
        dice.shuffle(starts)
        dice.shuffle(pairs)
        yield depth_first(count, pairs, starts)
        backward = [(reader, maker) for maker, reader in pairs]
        yield tuple(reversed(depth_first(count, backward, starts)))


class _Search:
    """The dynamic program: least[state][ideal] is the least objective of the devices in use.

    Args:
        problem: what to place.
        sets: the ideals, by size; the first is empty, the last is everything.
        bound: only placements whose objective is smaller are looked for.
        objective: the largest load, or the sum of loads.
    """

    def __init__(
        self, problem: Problem, sets: Sets, bound: float, objective: Objective = "max"
    ) -> None:
        self.problem, self.sets, self.bound = problem, sets, bound
        self._adds = objective == "sum"
        self.least: dict[_State, Times] = {}
        self._covered: dict[_State, Times] = {}
        self.best_from: dict[_State, tuple[Indices, Indices]] = {}  # ideal -> ideal, kind
        finite = np.where(np.isfinite(problem.times), problem.times, 0.0)
        self._times = finite @ sets.T  # [kind, ideal]
        self._cannot = (~np.isfinite(problem.times)).astype(float) @ sets.T
        self._nbytes = sets @ problem.nbytes

    def run(self) -> tuple[tuple[int, ...], float] | None:
        """Return the homes and the largest load; None when nothing is under the bound."""
        counts = [range(kind.count + 1) for kind in self.problem.kinds]
        for state in sorted(product(*counts), key=lambda s: (sum(s), s)):
            self._fill(state)
        ends = [(float(least[-1]), state) for state, least in self.least.items()]
        load, state = min(ends, key=lambda end: (end[0], sum(end[1]), end[1]))
        return (self._homes(state), load) if np.isfinite(load) else None

    def _fill(self, state: _State) -> None:
        count = len(self.sets)
        least = np.full(count, np.inf)
        source, kind_of = np.zeros(count, np.intp), np.zeros(count, np.intp)
        if not any(state):
            least[0] = 0.0
        targets = np.flatnonzero(self._window(state))
        for kind, used in enumerate(state):
            if not used:
                continue
            known = self.least[_one_less(state, kind)]
            origins = np.flatnonzero(known < self._limit)
            in_time = targets[np.argsort(self._times[kind][targets], kind="stable")]
            for part in np.array_split(in_time, len(targets) // _CHUNK + 1):
                load, best = self._step(kind, origins, known[origins], part)
                better = load < least[part]
                at = part[better]
                least[at], source[at] = load[better], best[better]
                kind_of[at] = kind
        covered = np.full(count, np.inf)  # by fewer devices: these may as well do the rest
        for kind, used in enumerate(state):
            if used:
                covered = np.minimum(covered, self._covered[_one_less(state, kind)])
        least[least >= covered] = np.inf
        self._covered[state] = np.minimum(covered, least)
        self.least[state], self.best_from[state] = least, (source, kind_of)
        self._tighten(least)

    @property
    def _limit(self) -> float:
        """Loads from here on are of no interest."""
        return self.bound / _ROUNDING if np.isfinite(self.bound) else self.bound

    def _tighten(self, least: Times) -> None:
        """Look for nothing worse than a placement that is known already."""
        if np.isfinite(least[-1]):
            self.bound = min(self.bound, float(least[-1]) * _ROUNDING)

    def _window(self, state: _State) -> Sets:
        """Return which ideals these devices, and the rest of them what is left, can run in time.

        However nodes are spread over devices with weights y_d, the largest load is at least
        (sum over nodes of min_d y_d t) / (sum of y_d); y_d goes by speed.
        """
        share, work = self._weak
        if self._adds or not np.isfinite(self.bound):
            return np.ones(len(self.sets), dtype=bool)
        used = sum(u * share[k] for k, u in enumerate(state))
        free = sum(kind.count * share[k] for k, kind in enumerate(self.problem.kinds)) - used
        slack = 1e-9 * work[-1]
        fits: Sets = (work <= used * self.bound + slack) & (
            work[-1] - work <= free * self.bound + slack
        )
        return fits

    @cached_property
    def _weak(self) -> tuple[Times, Times]:
        times = self.problem.times
        finite = np.isfinite(times)
        worst = np.where(finite, times, times.max(where=finite, initial=0.0))
        share = 1.0 / np.maximum(worst.sum(axis=1), 1e-300)
        share /= share.max()
        each = np.where(finite, times, np.inf) * share[:, None]
        return share, self.sets @ each.min(axis=0)

    def _step(
        self, kind: int, origins: Indices, known: Times, targets: Indices
    ) -> tuple[Times, Indices]:
        """Return, for each target, the least maximum load by one more device, and from where."""
        until = self._times[kind][targets]
        since = self._times[kind][origins]
        near = since <= until.max(initial=-1.0)
        near &= since > until.min(initial=np.inf) - self._limit
        origins, known = origins[near], known[near]
        if not len(origins):
            return np.full(len(targets), np.inf), np.zeros(len(targets), np.intp)
        compute = until[None, :] - since[near][:, None]
        possible = self._holds(kind, origins, targets) & (compute < self._limit)
        possible &= within(self.sets[origins], self.sets[targets])
        keep = possible.any(axis=1)
        origins, known, possible = origins[keep], known[keep], possible[keep]
        if not len(origins):
            return np.full(len(targets), np.inf), np.zeros(len(targets), np.intp)
        loads = compute[keep] + self._crossing(kind, origins, targets)
        before = known[:, None]
        both = loads + before if self._adds else np.maximum(loads, before)
        reached = np.where(possible, both, np.inf)
        best = reached.argmin(axis=0)
        load = reached[best, np.arange(len(targets))]
        load[load >= self.bound] = np.inf
        return load, origins[best]

    def _holds(self, kind: int, origins: Indices, targets: Indices) -> Sets:
        """Return which pieces a device of a kind can hold and run."""
        limit = self.problem.kinds[kind].memory_bytes * (1 + 1e-12)
        fits = np.ones((len(origins), len(targets)), dtype=bool)
        if self._nbytes[-1] > limit:
            fits &= self._nbytes[targets] <= self._nbytes[origins][:, None] + limit
        if self._cannot[kind][-1]:
            fits &= self._cannot[kind][targets] == self._cannot[kind][origins][:, None]
        return fits

    def _crossing(self, kind: int, origins: Indices, targets: Indices) -> Times:
        """Return what crosses the boundary of every piece targets[j] minus origins[i].

        A net is paid for unless the piece has none of its members (both ideals have the same) or
        all of them (one ideal has none, the other all): total - (states match) as a product.
        """
        nets = [net.times[kind] for net in self.problem.nets]
        if not any(nets):
            return np.zeros((len(origins), len(targets)))
        state, weights = self._columns
        paid = weights[kind]
        left = state[0][origins] * paid[None, :]
        found: Times = sum(nets) - left @ state[1][targets].T
        return found

    @cached_property
    def _columns(self) -> tuple[tuple[Times, Times], Times]:
        """Return a column per net and state it can be in, for the smaller ideal and the larger."""
        left: list[Times] = []
        right: list[Times] = []
        weights: list[Sequence[float]] = []
        for net in self.problem.nets:
            number = states(self.sets, net.members)
            one_hot = number[:, None] == np.arange(int(number.max()) + 1)[None, :]
            also = one_hot.copy()
            also[:, 0] |= number == number[-1]  # all members here, none in the smaller ideal
            left.append(one_hot)
            right.append(also)
            weights += [net.times] * one_hot.shape[1]
        pair = np.hstack(left).astype(np.float64), np.hstack(right).astype(np.float64)
        return pair, np.array(weights).T

    def _homes(self, state: _State) -> tuple[int, ...]:
        """Follow the choices back; devices are numbered kind by kind."""
        firsts = np.cumsum([0, *(kind.count for kind in self.problem.kinds)])
        homes = np.zeros(self.problem.count, dtype=np.intp)
        at = len(self.sets) - 1
        while any(state):
            source, kind_of = self.best_from[state]
            kind, origin = int(kind_of[at]), int(source[at])
            homes[self.sets[at] & ~self.sets[origin]] = firsts[kind] + state[kind] - 1
            state, at = _one_less(state, kind), origin
        return tuple(int(home) for home in homes)


def _one_less(state: _State, kind: int) -> _State:
    return tuple(used - (k == kind) for k, used in enumerate(state))
