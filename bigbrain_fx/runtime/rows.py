"""Rows for inference: batches that may be short, from a stream or from a safetensors file.

This file knows batches; it knows no devices and no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .data import Stream
from .disk import require_regular
from .stream import BatchError

Batches = Callable[[int], Iterator[object]]


class RowStream(Stream):
    """A stream whose batches may have fewer rows than the model was split for.

    A short batch is filled up with copies of its last row: shapes of messages stay as they are.

    Attributes:
        rows: of the current batch, what fills it up left out.
        apart: whether rows stand alone; else a short batch is refused.
    """

    rows = 0
    apart = True

    @property
    def room(self) -> int:
        """How many rows a full batch has."""
        batched = [spec for name, spec in self.specs.items() if name not in self.whole]
        return batched[0][1][0] if batched else self.micro_batches

    def advance(self, step: int) -> None:
        """Load the batch of `step`; all its entries must have the same number of rows."""
        if step != self.step:
            self.rows = 0
        super().advance(step)
        self.rows = self.rows or self.room

    def _checked(self, name: str, value: object) -> Tensor:
        if name not in self.whole and isinstance(value, Tensor) and value.dim():
            self._require_rows(name, value.shape[0])
            value = _filled(value, self.room)
        return super()._checked(name, value)

    def _require_rows(self, name: str, found: int) -> None:
        if found == 0 or self.rows not in (0, found):
            raise BatchError(
                f"step {self.step}: batch entry {name!r} has {found} rows, "
                f"expected {self.rows or 'at least 1'}",
                code="BX5138",
            )
        if not self.apart:
            require_whole(found, self.room)
        self.rows = found


def _filled(value: Tensor, room: int) -> Tensor:
    missing = room - value.shape[0]
    if missing <= 0:
        return value
    last = value[-1:].expand(missing, *value.shape[1:])
    return torch.cat([value, last])


def require_whole(rows: int, room: int) -> None:
    """Refuse a last batch of fewer rows, which others would fill up: theirs depend on all.

    Raises:
        BatchError: rows are left over.
    """
    if rows % room:
        raise BatchError(
            f"expected whole batches of {room} rows, found {rows} rows: an output's row depends on "
            f"the others in its batch; give a multiple of {room}, or split with an example_batch() "
            "of as many rows as a batch has",
            code="BX5139",
        )


def count_rows(path: Path, inputs: Sequence[str], whole: Sequence[str]) -> int:
    """Return how many rows a file of input tensors has.

    Raises:
        BatchError: a tensor is missing, or they differ in their number of rows.
    """
    with _opened(path) as file:
        missing = [name for name in inputs if name not in file.keys()]  # noqa: SIM118  # no mapping
        if missing:
            raise BatchError(
                f"{path} has no tensor {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(repr, sorted(file.keys()))) or 'none'}",
                code="BX5140",
            )
        lengths = {name: _length(file, name) for name in inputs if name not in whole}
    counts = set(lengths.values())
    if len(counts) > 1 or 0 in counts:
        found = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise BatchError(
            f"{path}: the tensors need one number of rows, found {found}", code="BX5141"
        )
    return counts.pop() if counts else 1


def batches_of_file(
    path: Path, inputs: Sequence[str], whole: Sequence[str], room: int
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the rows of a file of input tensors, `room` at a time; only these are read."""
    with _opened(path) as file:
        for start in range(0, count_rows(path, inputs, whole), room):
            yield {
                name: file.get_tensor(name)
                if name in whole
                else file.get_slice(name)[start : start + room]
                for name in inputs
            }


def batches_of_tensors(
    tensors: Mapping[str, Tensor], inputs: Sequence[str], whole: Sequence[str], room: int
) -> list[Mapping[str, Tensor]]:
    """Return input tensors in batches of up to `room` rows.

    Raises:
        BatchError: a tensor is missing.
    """
    missing = [name for name in inputs if name not in tensors]
    if missing:
        raise BatchError(f"expected a tensor for {', '.join(map(repr, missing))}", code="BX5142")
    batched = [name for name in inputs if name not in whole]
    rows = max((tensors[name].shape[0] for name in batched), default=1)
    return [
        {
            name: tensors[name][start : start + room] if name in batched else tensors[name]
            for name in inputs
        }
        for start in range(0, rows, room)
    ]


def _opened(path: Path) -> Any:  # noqa: ANN401  # safetensors names no type for it
    try:
        require_regular(path)
        return safe_open(path, framework="pt")
    except (OSError, ValueError) as error:
        raise BatchError(f"cannot read {path}: {error}", code="BX5143") from error
    except Exception as error:  # SafetensorError is no OSError
        raise BatchError(f"{path} is no safetensors file: {error}", code="BX5144") from error


def _length(file: Any, name: str) -> int:  # noqa: ANN401  # as above
    shape = file.get_slice(name).get_shape()
    return int(shape[0]) if shape else 0
