"""Weights of micro-batches whose loss is a mean over elements that data choose; nests cut by rows.

    loss of the batch = sum over m of  loss of micro-batch m * count(m) / count(batch)

`count` is the model file's `loss_weight(batch)`: labels that are not ignored, boxes, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .entries import is_plain
from .stream import BatchError


@dataclass(frozen=True)
class LossWeight:
    """The count of a batch, and how a batch is cut to be counted.

    Attributes:
        count: batch -> how many elements its loss is a mean over.
        dims: entries that are not cut along dimension 0; None: every micro-batch has all of it.
    """

    count: Callable[[Any], Any]
    dims: Mapping[Path, int | None] = field(default_factory=dict)

    def counts(self, batch: object, rows: int, micro_batches: int, step: int) -> tuple[float, ...]:
        """Return the count of each micro-batch.

        Raises:
            BatchError: one is no number, negative, NaN or infinite; or all are zero.
        """
        parts = range(micro_batches)
        return self.checked((self._count(batch, rows, micro_batches, m, step) for m in parts), step)

    def checked(self, counts: Iterable[float], step: int) -> tuple[float, ...]:
        """Return the counts of a step's micro-batches.

        Raises:
            BatchError: all are zero.
        """
        found = tuple(counts)
        if not sum(found) > 0:
            raise BatchError(
                f"step {step}: loss_weight of the batch is 0, so nothing would be trained on: "
                "leave such batches out in batches()",
                code="BX5191",
            )
        return found

    def _count(self, batch: object, rows: int, parts: int, micro: int, step: int) -> float:
        return self.of(mapped(batch, part_of_rows(self.dims, rows, parts, micro)), step)

    def of(self, batch: object, step: int) -> float:
        """Return the count of one micro-batch.

        Raises:
            BatchError: it is no number, negative, NaN or infinite.
        """
        value = self.count(batch)
        is_number = isinstance(value, int | float) or (
            isinstance(value, Tensor) and not value.dim()
        )
        number = float(value) if is_number else math.nan
        if not 0 <= number < math.inf:
            shown = value if is_number or not isinstance(value, Tensor) else tuple(value.shape)
            raise BatchError(
                f"step {step}: loss_weight must return one number, 0 or more, found {shown!r}: "
                'return a count such as (batch["labels"] != -100).sum()',
                code="BX5192",
            )
        return number


Path = tuple[str | int, ...]
Change = Callable[[Tensor, Path], Tensor]


def mapped(value: Any, change: Change, path: Path = ()) -> Any:  # noqa: ANN401  # a nest of any kind
    """Return a nest with every tensor changed; what is neither nest nor tensor stays itself."""
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        return {key: mapped(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change, (*path, i)) for i, item in enumerate(value)]
        return getattr(type(value), "_make", type(value))(items)
    return value


def part_of_rows(dims: Mapping[Path, int | None], rows: int, parts: int, micro: int) -> Change:
    """Return what takes a micro-batch of a batch's tensor: a view of its rows.

    Args:
        dims: tensors whose rows are not in dimension 0; None: every micro-batch has all of it.
        rows: of the batch; a tensor with another length there is not cut.
        parts: how many micro-batches there are.
        micro: which one.
    """

    def part(tensor: Tensor, path: Path) -> Tensor:
        dim = dims.get(path, 0)
        if dim is None or not is_plain(tensor) or tensor.dim() <= dim or tensor.shape[dim] != rows:
            return tensor
        return tensor.tensor_split(parts, dim)[micro]

    return part
