"""Fitted regressions as plain arrays, and how they are evaluated: numpy, and nothing learned here.

They give what scikit-learn's `predict` gives (to 1e-9), without scikit-learn, and are read from
JSON: numbers and lists, so that opening somebody's file runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LEAF = -1


@dataclass(frozen=True)
class Linear:
    """center and scale each column, then coefficients and an intercept."""

    center: Floats
    scale: Floats
    coefficients: Floats
    intercept: float

    def predict(self, x: Floats) -> Floats:
        """Return one number for each row of `x`, shape (rows, columns)."""
        found: Floats = ((x - self.center) / self.scale) @ self.coefficients + self.intercept
        return found

    @property
    def columns(self) -> int:
        """How many features it takes."""
        return len(self.coefficients)


@dataclass(frozen=True)
class Kernel:
    """A support vector machine: the sum of Gaussians around `vectors`, and an intercept.

    exp(-gamma |x - v|^2), after each column was centered and scaled. `vectors` are scaled already,
    shape (vectors, columns).
    """

    center: Floats
    scale: Floats
    vectors: Floats
    coefficients: Floats
    intercept: float
    gamma: float

    def predict(self, x: Floats) -> Floats:
        """Return one number for each row of `x`, shape (rows, columns)."""
        scaled = (x - self.center) / self.scale
        found = np.array([self._one(row) for row in scaled], np.float64)
        return found

    def _one(self, row: Floats) -> float:
        squares = ((self.vectors - row) ** 2).sum(axis=1)
        return float(np.exp(-self.gamma * squares) @ self.coefficients + self.intercept)

    @property
    def columns(self) -> int:
        """How many features it takes."""
        return int(self.vectors.shape[1])


@dataclass(frozen=True)
class Trees:
    """Regression trees whose leaves are added up: base + weight * sum.

    The nodes of all trees stand in one list; `roots` are where each begins. At a node the column
    `feature` of x is compared: at most `threshold` goes to `left`, more to `right`; a leaf has
    feature -1 and gives `value`. Columns are compared as float32, as scikit-learn does.
    """

    roots: Integers
    feature: Integers
    threshold: Floats
    left: Integers
    right: Integers
    value: Floats
    base: float
    weight: float
    columns: int

    def predict(self, x: Floats) -> Floats:
        """Return one number for each row of `x`, shape (rows, columns)."""
        narrow = x.astype(np.float32)
        node = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        while (inner := self.feature[node] != LEAF).any():
            row, _tree = np.nonzero(inner)
            at = node[inner]
            goes_left = narrow[row, self.feature[at]] <= self.threshold[at]
            node[inner] = np.where(goes_left, self.left[at], self.right[at])
        found: Floats = self.base + self.weight * self.value[node].sum(axis=1)
        return found


Regressor: TypeAlias = Linear | Kernel | Trees

_ARRAYS: Mapping[type[Regressor], tuple[str, ...]] = {
    Linear: ("center", "scale", "coefficients"),
    Kernel: ("center", "scale", "vectors", "coefficients"),
    Trees: ("roots", "feature", "threshold", "left", "right", "value"),
}
_NUMBERS: Mapping[type[Regressor], tuple[str, ...]] = {
    Linear: ("intercept",),
    Kernel: ("intercept", "gamma"),
    Trees: ("base", "weight", "columns"),
}
_TYPES: Mapping[str, type[Regressor]] = {"linear": Linear, "kernel": Kernel, "trees": Trees}
_INTEGERS = frozenset({"roots", "feature", "left", "right"})


def to_json(regressor: Regressor) -> dict[str, Any]:
    """Return a regression as numbers and lists."""
    kind = next(name for name, made in _TYPES.items() if isinstance(regressor, made))
    made = type(regressor)
    arrays = {name: getattr(regressor, name).tolist() for name in _ARRAYS[made]}
    return {"type": kind, **{name: getattr(regressor, name) for name in _NUMBERS[made]}, **arrays}


def from_json(found: Mapping[str, Any]) -> Regressor:
    """Return the regression that `to_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: something is missing or malformed; the reader of the file
            says where.
    """
    made = _TYPES[found["type"]]
    fields: dict[str, Any] = {name: float(found[name]) for name in _NUMBERS[made]}
    for name in _ARRAYS[made]:
        fields[name] = np.array(found[name], np.int64 if name in _INTEGERS else np.float64)
    if made is Trees:
        fields["columns"] = int(fields["columns"])
    regressor = made(**fields)
    _check(regressor)
    return regressor


def _check(regressor: Regressor) -> None:
    """Refuse arrays that do not fit together, and trees with circles."""
    match regressor:
        case Trees():
            _check_trees(regressor)
        case Kernel():
            wide = (len(regressor.coefficients), len(regressor.center))
            _require(regressor.vectors.shape == wide, "vectors and coefficients")
            _require(regressor.center.shape == regressor.scale.shape, "center and scale")
        case Linear():
            shapes = {regressor.center.shape, regressor.scale.shape, regressor.coefficients.shape}
            _require(len(shapes) == 1, "center, scale and coefficients")
    for name in _ARRAYS[type(regressor)]:
        _require(bool(np.isfinite(getattr(regressor, name)).all()), f"the numbers of {name}")


def _check_trees(trees: Trees) -> None:
    nodes = len(trees.feature)
    arrays = (trees.threshold, trees.left, trees.right, trees.value)
    _require(all(array.shape == (nodes,) for array in arrays), "the lists of nodes")
    _require(bool(((trees.roots >= 0) & (trees.roots < nodes)).all()), "roots")
    _require(bool((trees.feature < trees.columns).all()), "feature")
    inner = np.flatnonzero(trees.feature != LEAF)
    for children in (trees.left[inner], trees.right[inner]):  # after their parent: no circles
        _require(bool(((children > inner) & (children < nodes)).all()), "left and right")
    _require(bool((trees.feature[inner] >= 0).all()), "feature")


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"{what} do not fit together")


def joined(parts: Sequence[Trees]) -> Trees:
    """Return trees that were made one by one as one list of nodes; base and weight of the first."""
    offsets = np.cumsum([0, *(len(part.feature) for part in parts)])[:-1]
    shifted = [
        (part.roots + at, np.where(part.feature == LEAF, LEAF, part.left + at))
        for part, at in zip(parts, offsets, strict=True)
    ]
    rights = [
        np.where(part.feature == LEAF, LEAF, part.right + at)
        for part, at in zip(parts, offsets, strict=True)
    ]
    return Trees(
        roots=np.concatenate([roots for roots, _ in shifted]),
        feature=np.concatenate([part.feature for part in parts]),
        threshold=np.concatenate([part.threshold for part in parts]),
        left=np.concatenate([left for _, left in shifted]),
        right=np.concatenate(rights),
        value=np.concatenate([part.value for part in parts]),
        base=parts[0].base,
        weight=parts[0].weight,
        columns=parts[0].columns,
    )
