"""Integer programs by scipy's HiGHS: rows and columns in, shares out; quiet, and counted in work.

It knows no placement. scipy is an extra.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Entry = tuple[int, float]  # column, factor


def available() -> bool:
    """Whether scipy is installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Program:
    """Columns from 0 to `upper`, and rows `least <= sum of factor x column <= most`: mutable."""

    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _least: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)

    def column(self, upper: float = 1.0, whole: bool = False, cost: float = 0.0) -> int:
        """Add a column, and return its number."""
        self.upper.append(upper)
        self.whole.append(whole)
        self.cost.append(cost)
        return len(self.upper) - 1

    def row(self, entries: Sequence[Entry], least: float = -np.inf, most: float = np.inf) -> None:
        """Add a row."""
        self._rows += [len(self._least)] * len(entries)
        self._columns += [column for column, _ in entries]
        self._factors += [factor for _, factor in entries]
        self._least.append(least)
        self._most.append(most)

    def solved(self, tree: int, gap: float = 1e-4) -> Answer:
        """Minimise the cost.

        Args:
            tree: at most so many nodes of the search tree are looked at; a limit in seconds would
                give other answers on other machines.
            gap: stop when so close, as a share of the cost, to the best.
        """
        from scipy import optimize, sparse

        shape = len(self._least), len(self.upper)
        matrix = sparse.csr_array((self._factors, (self._rows, self._columns)), shape)
        with _quiet():
            found: Any = optimize.milp(
                np.array(self.cost),
                integrality=np.array(self.whole, dtype=int),
                bounds=optimize.Bounds(np.zeros(len(self.upper)), np.array(self.upper)),
                constraints=optimize.LinearConstraint(matrix, self._least, self._most),
                options={"node_limit": tree, "mip_rel_gap": gap},
            )
        if found.status == 2:
            return Answer("impossible", None, float("inf"))
        bound = found.get("mip_dual_bound")
        low = -np.inf if bound is None or not np.isfinite(bound) else float(bound)
        if found.x is None:
            return Answer("unknown", None, low)
        return Answer("best" if found.status == 0 else "found", np.asarray(found.x), low)


@dataclass(frozen=True)
class Answer:
    """What became of a program; `bound` is below every answer's cost."""

    status: Literal["best", "found", "impossible", "unknown"]
    columns: NDArray[np.float64] | None
    bound: float


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what HiGHS 1.12 prints to the C standard output, whatever it is told, out of ours."""
    try:
        flush = ctypes.CDLL(None).fflush
        sys.stdout.flush()
        flush(None)
        kept = os.dup(1)
    except (OSError, AttributeError, TypeError, ValueError):
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
