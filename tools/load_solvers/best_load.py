"""Problem -> the best placement that can be found for some work, with a bound: contiguous or not.

A portfolio, each from the best of those before: cuts of a few orders, the contiguous optimum over
ideals, random walks, and integer programs over a few devices. For the largest load; it knows no
graph, no files and no schedule. Effort is counted in work, so that an answer is the same anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

import numpy as np

from bigbrain_fx.errors import NoPlanError
from tools.load_solvers.contiguous import best_contiguous
from tools.load_solvers.least_load import least_load
from tools.load_solvers.load_bound import load_bound
from tools.load_solvers.loads import improved
from tools.load_solvers.neighbourhood import polished
from tools.load_solvers.problem import Problem
from tools.load_solvers.programs import Program, available
from tools.load_solvers.reduce import Reduced, reduced

Effort: TypeAlias = Literal["fast", "normal", "high"]


@dataclass(frozen=True, slots=True)
class Work:
    """How much an effort may do.

    Attributes:
        ideals: at most so many are listed.
        steps: of each random walk, for problems of 100 to 400 nodes; of others fewer.
        walks: with a seed each.
        programs: integer programs after each walk.
        proving: of CP-SAT's deterministic seconds at the end, where OR-tools is installed.
    """

    ideals: int
    steps: int
    walks: int
    programs: int
    proving: float = 0.0


WORK: dict[Effort, Work] = {
    "fast": Work(1, 3_000, 1, 0),
    "normal": Work(3_000, 40_000, 1, 25),
    "high": Work(40_000, 100_000, 2, 40, 60.0),
}


@dataclass(frozen=True)
class Found:
    """A placement; no placement that fits has a smaller largest load than `bound`.

    `start` is the contiguous load that the improvement began with (None: none fits), and `proven`
    whether it was the least of all contiguous ones.
    """

    homes: tuple[int, ...]
    load: float
    bound: float
    start: float | None
    proven: bool


def best_load(problem: Problem, effort: Effort = "normal", seed: int = 0) -> Found | None:
    """Return the best placement found; None when nothing was found that fits.

    Args:
        problem: what to place.
        effort: how much work to do.
        seed: of the walks.

    Raises:
        NoPlanError: it is proven that nothing fits.
    """
    work = WORK[effort]
    bound = load_bound(problem)
    contiguous = best_contiguous(problem, work.ideals)
    homes = contiguous.homes if contiguous else packed(problem)
    if homes is None:
        return None
    candidates = [homes]
    for walk in range(work.walks):
        if problem.max_load(candidates[-1]) > bound * (1 + _CLOSE):
            candidates.append(_better(problem, homes, work, seed + walk))
    best = min(candidates, key=problem.max_load)
    if len(candidates) > 2:  # once more, from the best
        best = _polished(problem, best, work.programs, seed + work.walks)
    best, proven = _proven(problem, best, work.proving, seed)
    bound = max(bound, proven)
    start, load = contiguous.load if contiguous else None, problem.max_load(best)
    return Found(best, load, min(bound, load), start, bool(contiguous and contiguous.proven))


def _proven(
    problem: Problem, homes: tuple[int, ...], work: float, seed: int
) -> tuple[tuple[int, ...], float]:
    """Return the placement or a better one, and a bound, by CP-SAT where it can be asked."""
    if not work or find_spec("ortools") is None:
        return homes, 0.0
    found = least_load(problem, homes, work, seed)
    if found is None:
        return homes, 0.0
    return min(homes, found.homes, key=problem.max_load), found.bound


def packed(problem: Problem) -> tuple[int, ...] | None:
    """Return a placement that fits, whatever its load; None: none was found.

    The largest nodes first, each where the most room is left; then, where scipy is, an integer
    program.

    Raises:
        NoPlanError: it is proven that nothing fits.
    """
    kinds = problem.kind_of_device
    left = np.array([problem.kinds[kind].memory_bytes for kind in kinds])
    homes = [-1] * problem.count
    for node in sorted(range(problem.count), key=lambda node: -problem.nbytes[node]):
        runs = np.isfinite(problem.times[list(kinds), node])
        home = int(np.where(runs, left, -np.inf).argmax())
        left[home] -= problem.nbytes[node]
        homes[node] = home
    if problem.fits(homes):
        return tuple(homes)
    return _packed_exactly(problem) if available() else None


def _packed_exactly(problem: Problem) -> tuple[int, ...] | None:
    program, kinds = Program(), problem.kind_of_device
    runs = np.isfinite(problem.times[list(kinds)])
    x = [
        [program.column(float(runs[device, node]), whole=True) for device in range(len(kinds))]
        for node in range(problem.count)
    ]
    for columns in x:
        program.row([(column, 1.0) for column in columns], 1.0, 1.0)
    for device, kind in enumerate(kinds):
        room = problem.kinds[kind].memory_bytes
        if np.isfinite(room):
            each = problem.nbytes / max(room, 1.0)
            held = [(x[node][device], float(each[node])) for node in range(problem.count)]
            program.row(held, most=room / max(room, 1.0))
    answer = program.solved(_PACKING_TREE)
    if answer.status == "impossible":
        raise NoPlanError("nothing fits: proven by an integer program over bytes", help=_MORE)
    if answer.columns is None:
        return None
    homes = tuple(int(answer.columns[columns].argmax()) for columns in x)
    return homes if problem.fits(homes) else None


def _better(problem: Problem, homes: Sequence[int], work: Work, seed: int) -> tuple[int, ...]:
    """Walk, then solve integer programs, on the problem without what is not worth cutting."""
    small, start = _narrowed(problem, homes)
    steps = _steps(work.steps, small.problem.count)
    walked = improved(small.problem, start, steps, seed)
    return small.spread(polished(small.problem, walked, work.programs, seed))


def _steps(steps: int, nodes: int) -> int:
    """Return how far to walk: less where there is little to find, and where a step takes long."""
    return int(steps * min(1.0, nodes / _FEW_NODES, _MANY_NODES / max(1, nodes)))


def _polished(problem: Problem, homes: Sequence[int], programs: int, seed: int) -> tuple[int, ...]:
    small, start = _narrowed(problem, homes)
    return small.spread(polished(small.problem, start, programs, seed))


def _narrowed(problem: Problem, homes: Sequence[int]) -> tuple[Reduced, list[int]]:
    """Make one of nodes that no better placement parts; return the placement of what is left."""
    small = reduced(problem, problem.max_load(homes) * (1 + 1e-9), contiguous=False)
    start = [0] * small.problem.count
    for node, group in enumerate(small.group_of):
        start[group] = homes[node]
    return small, start


_CLOSE = 1e-6  # to the bound: no need to look further
_FEW_NODES, _MANY_NODES = 100, 400
_PACKING_TREE = 20_000
_MORE = "more devices, more memory, or devices that run every node"
