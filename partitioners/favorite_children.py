"""Jobs -> favorite children: which job should follow which on one device, by a linear program.

It knows jobs; it knows no memory. scipy's HiGHS solves the program.

Source: Hanen and Munier (ETFA'95) as used by Baechi (SoCC'20), section 3.3. Baechi rounds each edge
on its own and keeps the last where two claim a job; here edges are taken from the surest on, so
that the favorites are a matching.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .jobs import Jobs

SURE = 0.5  # an edge below this, of 0 (kept together) to 1 (cut), makes a favorite


def favorite_children(jobs: Jobs) -> dict[int, int]:
    """Return the favorite child of every job that has one; no job is the favorite of two."""
    edges, moves = _edges(jobs)
    if not edges:
        return {}
    together = _relaxed(_typical(jobs.times), edges, moves)
    found: dict[int, int] = {}
    taken: set[int] = set()
    for number in np.argsort(together, kind="stable").tolist():
        parent, child = edges[number]
        if together[number] < SURE and parent not in found and child not in taken:
            found[parent] = child
            taken.add(child)
    return found


def _typical(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the devices where each job can run."""
    finite = np.isfinite(times)
    total = np.where(finite, times, 0.0).sum(axis=0)
    return np.asarray(total / np.maximum(finite.sum(axis=0), 1), dtype=np.float64)


def _edges(jobs: Jobs) -> tuple[list[tuple[int, int]], NDArray[np.float64]]:
    """Return who waits for whom, and what moving the values between them takes on average."""
    devices = range(jobs.times.shape[0])
    pairs = [(a, b) for a in devices for b in devices if a != b]
    mean: dict[int, float] = {}
    cost: dict[tuple[int, int], float] = {
        (before, job): 0.0 for job, befores in enumerate(jobs.after) for before in befores
    }
    for job, values in enumerate(jobs.reads):
        for value in values:
            if value not in mean:
                total = sum(jobs.move(value, a, b) for a, b in pairs)
                mean[value] = total / max(1, len(pairs))
            edge = jobs.makers[value], job
            cost[edge] = cost.get(edge, 0.0) + mean[value]
    edges = sorted(cost)
    return edges, np.array([cost[edge] for edge in edges])


def _relaxed(
    times: NDArray[np.float64], edges: Sequence[tuple[int, int]], moves: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve the relaxation; return per edge 0 (the reader follows at once) to 1 (it is sent).

    Minimise w over starts s and x in [0, 1], where for each edge s_u + p_u + c_uv x_uv <= s_v, for
    each job s_v + p_v <= w, and all but one of a job's edges out, and of its edges in, are sent.
    """
    from scipy import optimize, sparse

    count, many = len(times), len(edges)
    makers, readers = np.array(edges).T
    rows = np.arange(many)
    one = np.ones(many)
    columns = (many, count, 1)  # x, s, w
    before = sparse.csr_matrix((one, (rows, makers)), (many, count))
    after = sparse.csr_matrix((one, (rows, readers)), (many, count))
    moved = sparse.diags_array(moves)
    blocks = [
        [moved, before - after, None],
        [None, sparse.eye_array(count), sparse.csr_matrix(-np.ones((count, 1)))],
        [-before.T, None, None],
        [-after.T, None, None],
    ]
    degrees = [1.0 - before.sum(axis=0), 1.0 - after.sum(axis=0)]
    upper = np.concatenate([-times[makers], -times, *(np.asarray(d).ravel() for d in degrees)])
    found = optimize.linprog(
        np.repeat([0.0, 0.0, 1.0], columns),
        A_ub=sparse.block_array(blocks, format="csr"),
        b_ub=upper,
        bounds=[(0.0, 1.0)] * many + [(0.0, None)] * (count + 1),
        method="highs",
    )
    if found.status != 0:
        raise AssertionError(f"the relaxation has a solution, but HiGHS says: {found.message}")
    return np.asarray(found.x[:many], dtype=np.float64)
