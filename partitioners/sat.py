"""The one door to OR-tools' CP-SAT: the module, if it is installed, and a solve that repeats.

One worker, a fixed seed, and a limit that is counted in work and not in time: equal programs give
equal answers and bounds on any machine. OR-tools is an extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

from bigbrain_fx.errors import InputError

Variable: TypeAlias = Any  # of CP-SAT, or an expression over some; OR-tools is an extra
Model: TypeAlias = Any
FINENESS = 2**22  # the largest cost in whole numbers: rounding takes less than units / FINENESS


@dataclass(frozen=True)
class Answer:
    """What a solve gave.

    Attributes:
        values: of the variables asked for, or None when nothing was found.
        bound: what no solution's objective is below.
        impossible: whether it is proven that there is no solution.
    """

    values: tuple[int, ...] | None
    bound: int
    impossible: bool


def cp_model() -> ModuleType:
    """Return OR-tools' module.

    Raises:
        InputError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model as module
    except ImportError as error:
        raise InputError(
            "cp-sat needs OR-tools, which is not installed",
            code="BX1407",
            help="pip install ortools; or use ideal-dp, or mcmc, which need nothing",
        ) from error
    found: ModuleType = module
    return found


def solved(
    model: Model, wanted: Iterable[Variable], hints: Mapping[Variable, int], work: float, seed: int
) -> Answer:
    """Solve a model."""
    module = cp_model()
    for variable, value in hints.items():
        model.add_hint(variable, value)
    solver = module.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work
    solver.parameters.linearization_level = 2
    solver.parameters.symmetry_level = 2
    status = solver.solve(model)
    bound = max(0, round(solver.best_objective_bound))
    if status in (module.OPTIMAL, module.FEASIBLE):
        return Answer(tuple(solver.value(v) for v in wanted), bound, False)
    return Answer(None, 0, status == module.INFEASIBLE)
