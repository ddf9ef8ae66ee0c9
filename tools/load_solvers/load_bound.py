"""Problem -> what no placement's largest load is below: a linear program, or weak duality.

It knows nothing of contiguity: the bound holds for every placement. What crosses devices is left
out, so it is far off where that dominates. scipy's HiGHS solves the program; without scipy, weights
by speed give a bound that is no better.
"""

from __future__ import annotations

import numpy as np

from bigbrain_fx.errors import NoPlanError
from tools.load_solvers.problem import Problem, Times
from tools.load_solvers.programs import available


def load_bound(problem: Problem) -> float:
    """Return a lower bound of the largest load of any placement that fits.

    Nodes may be divided among the kinds of devices here: minimise T, where each kind's share of the
    times is at most T for each of its devices, and its share of the bytes what they hold.

    Raises:
        NoPlanError: not even nodes that may be divided can be held.
    """
    dearest = float(problem.times.min(axis=0).max(initial=0.0))
    if not available():
        return max(dearest, weak_bound(problem.times, [kind.count for kind in problem.kinds]))
    return max(dearest, _divided(problem))


def weak_bound(times: Times, counts: list[int]) -> float:
    """Return the mean load under weights y by speed: sum of min_d y_d t / sum of y_d.

    Args:
        times: [kind, node].
        counts: devices of each kind.
    """
    finite = np.isfinite(times)
    worst = np.where(finite, times, times.max(where=finite, initial=0.0))
    share = 1.0 / np.maximum(worst.sum(axis=1), 1e-300)
    total = sum(count * y for count, y in zip(counts, share, strict=True))
    least = np.where(finite, times, np.inf) * share[:, None]
    return float(least.min(axis=0).sum() / total)


def _divided(problem: Problem) -> float:
    from scipy import optimize, sparse

    kinds, count = problem.times.shape
    limits = np.array([kind.memory_bytes for kind in problem.kinds]) * (1 + 1e-12)
    finite = np.isfinite(problem.times) & (problem.nbytes[None, :] <= limits[:, None])
    times = np.where(finite, problem.times, 0.0)
    scale = max(float(times.max(initial=0.0)), 1e-300)
    rows, upper = [], []
    for kind in range(kinds):  # columns: [kind, node] in a row, then T
        row = np.zeros(kinds * count + 1)
        row[kind * count : (kind + 1) * count] = times[kind] / scale
        row[-1] = -problem.kinds[kind].count
        rows.append(row)
        upper.append(0.0)
        room = problem.kinds[kind].memory_bytes * problem.kinds[kind].count * (1 + 1e-9)
        if np.isfinite(room) and room < problem.nbytes.sum():
            row = np.zeros(kinds * count + 1)
            row[kind * count : (kind + 1) * count] = problem.nbytes / max(room, 1e-300)
            rows.append(row)
            upper.append(1.0)
    whole = sparse.hstack([sparse.eye_array(count)] * kinds + [sparse.csr_array((count, 1))])
    found = optimize.linprog(
        np.append(np.zeros(kinds * count), 1.0),
        A_ub=sparse.csr_array(np.array(rows)),
        b_ub=upper,
        A_eq=whole,
        b_eq=np.ones(count),
        bounds=[*((0.0, float(runs)) for runs in finite.ravel()), (0.0, None)],
        method="highs",
    )
    if found.status == 2:
        raise NoPlanError(
            "nothing fits: not even nodes that could be divided among the devices",
            notes=(f"{problem.nbytes.sum():.6g} bytes in all",),
            help="more devices, more memory, or devices that run every node",
        )
    if found.status != 0:
        return weak_bound(problem.times, [kind.count for kind in problem.kinds])
    return float(found.fun) * scale * (1 - 1e-9)  # less than rounding may have added
