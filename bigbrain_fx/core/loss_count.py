"""The count by which micro-batches weigh: how many elements of a batch its loss is a mean over."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

ROW_COUNTS = "loss_weight"
"""Entry of a batch with the count of each row, where a bundle cannot count by itself."""


@dataclass(frozen=True, slots=True)
class LossCount:
    """Number of elements that a loss is a mean over, by one entry of the batch.

    Attributes:
        key: path of the entry in the batch.
        first: positions left out at the start of dimension 1: 1 where labels are shifted.
        ignored: the value that does not count; None: the entry is a mask, and its sum counts.
    """

    key: tuple[str | int, ...]
    first: int = 0
    ignored: int | None = None

    def of(self, batch: Any) -> Any:  # noqa: ANN401  # tensors: this package imports no torch
        """Return the count of a batch, a tensor without dimensions."""
        entry = batch
        for step in self.key:
            entry = entry[step]
        entry = entry[:, self.first :] if self.first else entry
        return (entry if self.ignored is None else entry != self.ignored).sum()

    @property
    def expression(self) -> str:
        """Python for `of`: `(batch['labels'][:, 1:] != -100).sum()`."""
        entry: ast.expr = ast.Name("batch", ast.Load())
        for step in self.key:
            entry = ast.Subscript(entry, ast.Constant(step), ast.Load())
        if self.first:
            shifted = ast.Tuple([ast.Slice(), ast.Slice(ast.Constant(self.first))], ast.Load())
            entry = ast.Subscript(entry, shifted, ast.Load())
        if self.ignored is not None:
            value = ast.parse(repr(self.ignored), mode="eval").body
            entry = ast.Compare(entry, [ast.NotEq()], [value])
        return ast.unparse(ast.Call(ast.Attribute(entry, "sum", ast.Load()), [], []))
