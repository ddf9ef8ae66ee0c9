"""Fitted regressions as plain arrays, and how they are evaluated: numpy, and nothing learned here.

They give what scikit-learn's `predict` gives (to 1e-9), without scikit-learn, and are read from
JSON: numbers and lists, so that opening somebody's file runs nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    model_validator,
)

LEAF = -1


def _as_array(kind: type, dtype: type) -> PlainValidator:
    """Return what takes an array as it is, and a list of numbers as an array."""
    listed = TypeAdapter[Any](list[kind])  # type: ignore[valid-type]

    def array(found: object) -> NDArray[Any]:
        numbers = found if isinstance(found, np.ndarray) else listed.validate_python(found)
        return np.asarray(numbers, dtype)

    return PlainValidator(array)


_AS_LIST = PlainSerializer(np.ndarray.tolist)
Floats: TypeAlias = Annotated[NDArray[np.float64], _as_array(FiniteFloat, np.float64), _AS_LIST]
Integers: TypeAlias = Annotated[NDArray[np.int64], _as_array(int, np.int64), _AS_LIST]


class Strict(BaseModel):
    """A part of the file: frozen, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Linear(Strict):
    """center and scale each column, then coefficients and an intercept."""

    type: Literal["linear"] = "linear"
    center: Floats
    scale: Floats
    coefficients: Floats
    intercept: FiniteFloat

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return one number for each row of `x`, shape (rows, columns)."""
        found: NDArray[np.float64] = (
            (x - self.center) / self.scale
        ) @ self.coefficients + self.intercept
        return found

    @property
    def columns(self) -> int:
        """How many features it takes."""
        return len(self.coefficients)

    @model_validator(mode="after")
    def _check(self) -> Self:
        shapes = {self.center.shape, self.scale.shape, self.coefficients.shape}
        _require(len(shapes) == 1, "center, scale and coefficients")
        return self


class Trees(Strict):
    """Regression trees whose leaves are added up: base + weight * sum.

    The nodes of all trees stand in one list; `roots` are where each begins. At a node the column
    `feature` of x is compared: at most `threshold` goes to `left`, more to `right`. A leaf has
    feature -1 and gives `value`. Columns are compared as float32, as scikit-learn does.
    """

    type: Literal["trees"] = "trees"
    roots: Integers
    feature: Integers
    threshold: Floats
    left: Integers
    right: Integers
    value: Floats
    base: FiniteFloat
    weight: FiniteFloat
    columns: int

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return one number for each row of `x`, shape (rows, columns)."""
        narrow = x.astype(np.float32)
        node = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        while (inner := self.feature[node] != LEAF).any():
            row, _tree = np.nonzero(inner)
            at = node[inner]
            goes_left = narrow[row, self.feature[at]] <= self.threshold[at]
            node[inner] = np.where(goes_left, self.left[at], self.right[at])
        found: NDArray[np.float64] = self.base + self.weight * self.value[node].sum(axis=1)
        return found

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse lists that do not fit together, and trees with circles."""
        nodes = len(self.feature)
        lists = (self.threshold, self.left, self.right, self.value)
        _require(all(each.shape == (nodes,) for each in lists), "the lists of nodes")
        _require(bool(((self.roots >= 0) & (self.roots < nodes)).all()), "roots")
        _require(bool((self.feature < self.columns).all()), "feature")
        inner = np.flatnonzero(self.feature != LEAF)
        for children in (self.left[inner], self.right[inner]):  # after their parent: no circles
            _require(bool(((children > inner) & (children < nodes)).all()), "left and right")
        _require(bool((self.feature[inner] >= 0).all()), "feature")
        return self


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"{what} do not fit together")


Regressor: TypeAlias = Annotated[Linear | Trees, Field(discriminator="type")]
