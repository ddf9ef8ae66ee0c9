"""Rows of requests as bytes: JSON or safetensors in, one batch for all, and answers cut out of it.

The standard library only: no number is computed here, none is rounded.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bigbrain_fx.errors import InputError

_CODES = {  # torch's name -> safetensors' name, code of struct
    "float64": ("F64", "d"),
    "float32": ("F32", "f"),
    "float16": ("F16", "e"),
    "bfloat16": ("BF16", "H"),
    "int64": ("I64", "q"),
    "int32": ("I32", "i"),
    "int16": ("I16", "h"),
    "int8": ("I8", "b"),
    "uint8": ("U8", "B"),
    "bool": ("BOOL", "?"),
}
_CODE_OF = dict(_CODES.values())
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes, in the order of its elements; `kind` is safetensors' name of its type."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return struct.calcsize(_CODE_OF[self.kind])

    def values(self) -> Any:  # noqa: ANN401  # numbers, nested as deep as there are dimensions
        """Return its numbers, nested as its shape says."""
        code = _CODE_OF[self.kind]
        flat: Sequence[Any] = struct.unpack(f"<{math.prod(self.shape)}{code}", self.data)
        if self.kind == "BF16":
            wide = struct.pack(f"<{len(flat)}I", *(bits << 16 for bits in flat))
            flat = struct.unpack(f"<{len(flat)}f", wide)
        return _nested(flat, self.shape)


Raw: TypeAlias = Mapping[str, RawTensor]


def kind_of(dtype: str) -> str:
    """Return safetensors' name of torch's type.

    Raises:
        InputError: none that can be served.
    """
    if dtype not in _CODES:
        raise InputError(
            f"inputs of type {dtype} cannot be served", code="BX3133", help="use `run --inputs`"
        )
    return _CODES[dtype][0]


def of_json(name: str, content: object, kind: str, shape: tuple[int, ...]) -> RawTensor:
    """Read nested lists of numbers; the first dimension may have any number of rows.

    Raises:
        InputError: they are no numbers of that type, or do not have that shape.
    """
    flat: list[Any] = []
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        _flatten(name, row, shape[1:], flat)
    code = _CODE_OF[kind]
    try:
        if kind == "BF16":
            raise TypeError("bfloat16 has no JSON")
        if code == "?" and not all(value in (0, 1) for value in flat):
            raise TypeError("expected true or false")
        data = struct.pack(f"<{len(flat)}{code}", *flat)
    except (struct.error, TypeError, OverflowError) as error:
        raise InputError(
            f"input {name!r} is of type {kind}, and its numbers are not: {error}",
            code="BX3134",
            help="send safetensors (Content-Type: application/octet-stream) for any type",
        ) from error
    return RawTensor(kind, (len(rows), *shape[1:]), data)


def _flatten(name: str, content: object, shape: Sequence[int], flat: list[Any]) -> None:
    if not shape:
        if not isinstance(content, int | float):
            raise InputError(
                f"input {name!r}: expected a number, found {_short(content)}", code="BX3135"
            )
        flat.append(content)
        return
    if not isinstance(content, list) or len(content) != shape[0]:
        found = f"{len(content)}" if isinstance(content, list) else _short(content)
        raise InputError(
            f"input {name!r}: expected lists of {shape[0]}, found {found}: every row has the shape "
            f"{list(shape)} or lies in one",
            code="BX3136",
            help="fill up what is shorter, and cut what is longer, as example_batch() has it",
        )
    for entry in content:
        _flatten(name, entry, shape[1:], flat)


def _short(content: object) -> str:
    text = repr(content)
    return text if len(text) < 40 else f"{text[:36]} ..."


def _nested(flat: Sequence[Any], shape: Sequence[int]) -> Any:  # noqa: ANN401  # as above
    if not shape:
        return flat[0]
    if len(shape) == 1:
        return list(flat)
    each = math.prod(shape[1:])
    return [_nested(flat[i * each : (i + 1) * each], shape[1:]) for i in range(shape[0])]


def encode(tensors: Raw) -> bytes:
    """Write safetensors; the header is filled up, so that the data is aligned."""
    header: dict[str, object] = {}
    start = 0
    for name, tensor in tensors.items():
        end = start + len(tensor.data)
        header[name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    data = b"".join(tensor.data for tensor in tensors.values())
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + data


def decode(content: bytes) -> dict[str, RawTensor]:
    """Read safetensors.

    Raises:
        InputError: it is none.
    """
    try:
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        header.pop("__metadata__", None)
        base = _LENGTH_BYTES + length
        found = {name: _decoded(entry, content[base:]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"the body is no safetensors: {error}", code="BX3137") from error
    return found


def _decoded(entry: Any, data: bytes) -> RawTensor:  # noqa: ANN401  # JSON of anybody
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    tensor = RawTensor(str(entry["dtype"]), shape, data[start:end])
    if min((*shape, start), default=0) < 0:
        raise ValueError("a negative size")
    if len(tensor.data) != math.prod(shape) * tensor.itemsize:
        raise ValueError(f"{len(tensor.data)} bytes for the shape {list(shape)}")
    return tensor


def joined(parts: Sequence[Raw]) -> dict[str, RawTensor]:
    """Put the rows of several requests one after another."""
    first = parts[0]
    return {
        name: RawTensor(
            tensor.kind,
            (sum(part[name].shape[0] for part in parts), *tensor.shape[1:]),
            b"".join(part[name].data for part in parts),
        )
        for name, tensor in first.items()
    }


def taken(tensor: RawTensor, dim: int, start: int, count: int) -> RawTensor:
    """Cut rows `start` to `start + count` out of a tensor that has them along `dim`."""
    shape = tensor.shape
    inner = math.prod(shape[dim + 1 :]) * tensor.itemsize
    block = shape[dim] * inner
    pieces = (
        tensor.data[outer * block + start * inner : outer * block + (start + count) * inner]
        for outer in range(math.prod(shape[:dim]))
    )
    return RawTensor(tensor.kind, (*shape[:dim], count, *shape[dim + 1 :]), b"".join(pieces))


def scores_at(tensor: RawTensor, position: int) -> Sequence[float]:
    """Return the scores of all words at a position, of [1, positions, words]."""
    words = tensor.shape[-1]
    width = words * tensor.itemsize
    data = tensor.data[position * width : (position + 1) * width]
    if tensor.kind == "F32":
        return array("f", data)
    found: list[float] = RawTensor(tensor.kind, (words,), data).values()
    return found
