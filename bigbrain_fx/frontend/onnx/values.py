"""The two kinds of values in an ONNX graph: tensors, and small host arrays that make up shapes.

ONNX computes shapes with the same operators as data (Shape, Gather, Concat, Reshape). A host array
is a NumPy array of Python numbers or of torch's symbolic sizes: a free batch size stays free. This
file knows no operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigbrain_fx.core import words
from bigbrain_fx.errors import CaptureError

Host: TypeAlias = NDArray[np.object_]
Value: TypeAlias = Tensor | Host | None
Number: TypeAlias = bool | int | float | torch.SymInt

HOST_LIMIT = 64  # entries; a longer integer constant is data, no shape

_NAMES = words("uint8 int8 uint16 int16 int32 int64 bool float16 uint32 uint64 complex64 bfloat16")
_DTYPES: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    **{getattr(onnx.TensorProto, name.upper()): getattr(torch, name) for name in _NAMES},
}


def torch_dtype(code: int, at: str) -> torch.dtype:
    """Return the torch dtype of an ONNX type number.

    Raises:
        CaptureError: torch has no such type; `at` names the node.
    """
    if code not in _DTYPES:
        name = onnx.TensorProto.DataType.Name(code)
        raise CaptureError(
            f"the ONNX type {name} has no counterpart in torch", code="BX2096", at=at
        )
    return _DTYPES[code]


def host(values: object) -> Host:
    """Make a host array of numbers, symbolic sizes, or lists of them."""
    if isinstance(values, np.ndarray):
        found = np.empty(values.shape, dtype=object)
        found[...] = _python(values)
        return found
    if not isinstance(values, list | tuple):
        found = np.empty((), dtype=object)
        found[()] = values
        return found
    found = np.empty(len(values), dtype=object)  # np.array would ask a symbolic size for its length
    for i, value in enumerate(values):
        found[i] = value
    return found


def _python(values: NDArray[np.generic]) -> object:
    if values.dtype == object:
        return values
    plain = np.empty(values.shape, dtype=object)
    for index in np.ndindex(values.shape):
        plain[index] = values[index].item()
    return plain


def numbers(value: Value, at: str) -> list[Number]:
    """Return the entries of a host array; `at` names the node that needs them.

    Raises:
        CaptureError: the value is a tensor: a shape that depends on data.
    """
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1))
    raise CaptureError(
        "a shape or an index here is computed from the data, so it is not known when splitting",
        code="BX2097",
        at=at,
        help="export the model with fixed sizes (only the batch may stay free), or simplify it "
        "first (onnxsim, onnxruntime's offline optimizer)",
    )


def sizes(value: Value, at: str) -> list[int]:
    """Return the entries of a host array as sizes (symbolic ones pass for ints)."""
    return [cast("int", entry) for entry in numbers(value, at)]


def number(value: Value, at: str) -> Number:
    """Return the one entry of a host array."""
    return numbers(value, at)[0]


def tensor_of(value: Value, like: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a value as a tensor; a host array takes `dtype`, else the kind of its numbers."""
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise CaptureError("an input that this operator needs is missing", code="BX2098")
    entries = list(value.reshape(-1))
    kind = dtype or _kind(entries, like)
    device = like.device if like is not None else None
    if any(isinstance(entry, torch.SymInt) for entry in entries):
        parts = [torch.full((), entry, dtype=kind, device=device) for entry in entries]
        return torch.stack(parts).reshape(value.shape)
    return torch.tensor(value.tolist(), dtype=kind, device=device)


def _kind(entries: Sequence[object], like: Tensor | None) -> torch.dtype:
    if any(isinstance(entry, float) for entry in entries):
        return like.dtype if like is not None and like.is_floating_point() else torch.float32
    if entries and all(isinstance(entry, bool) for entry in entries):
        return torch.bool
    return torch.int64


def operands(a: Value, b: Value) -> tuple[Any, Any]:
    """Return two operands of an elementwise call; a host array of one entry becomes a number."""
    if isinstance(a, Tensor):
        return a, _operand(b, a)
    if isinstance(b, Tensor):
        return _operand(a, b), b
    return tensor_of(a), tensor_of(b)


def _operand(value: Value, other: Tensor) -> Tensor | Number:
    if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= other.dim():
        return cast("Number", value.reshape(-1)[0])
    return tensor_of(value, other)
