"""Nests of dicts, lists and tuples that hold tensors: each one changed, or cut along its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .entries import is_plain

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
