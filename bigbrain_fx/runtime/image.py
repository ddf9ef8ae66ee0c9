"""A device's state as one run of bytes: a safetensors file, in memory or on a disk.

    8 bytes: length of the header | header: JSON, padded | tensors, the widest elements first

Facts that are no tensors lie as JSON in the header's `__metadata__`. This file is stdlib only: a
supervisor without torch reads and checks images, too. Format: github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .coded import CodedError

Buffer: TypeAlias = Any  # bytes, bytearray, memoryview, mmap: what has bytes

FORMAT = 1  # of a state
ALIGNMENT = 64  # of the first tensor: copies of whole cache lines
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


class ImageError(CodedError, ValueError):
    """Report bytes that are no whole image."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an image: element type by safetensors' name, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * WIDTHS[self.dtype]

    @property
    def end(self) -> int:
        """Return the place where the next image starts."""
        return self.start + self.size


@dataclass(frozen=True)
class ImageLayout:
    """Layout of an image; `head` is its first bytes, up to the first tensor."""

    head: bytes
    entries: Mapping[str, TensorEntry]
    facts: Mapping[str, Any]
    size: int


def layout_of(tensors: Iterable[TensorEntry], facts: Mapping[str, Any]) -> ImageLayout:
    """Lay tensors out; their `start` is not looked at."""
    ordered = sorted(tensors, key=lambda entry: (-WIDTHS[entry.dtype], entry.name))
    text: dict[str, object] = {"__metadata__": {"facts": json.dumps(facts, sort_keys=True)}}
    at = 0
    for entry in ordered:
        place = {"dtype": entry.dtype, "shape": entry.shape}
        text[entry.name] = {**place, "data_offsets": [at, at + entry.size]}
        at += entry.size
    head = json.dumps(text, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % ALIGNMENT)
    base = 8 + len(head)
    entries = {}
    at = base
    for entry in ordered:
        entries[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, at)
        at += entry.size
    return ImageLayout(len(head).to_bytes(8, "little") + head, entries, facts, at)


def read_layout(buffer: Buffer) -> ImageLayout:
    """Find out what is where in an image; `buffer` may be longer than it.

    Raises:
        ImageError: it is no whole image; says why.
    """
    view = memoryview(buffer)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 0 < length <= min(HEADER_LIMIT, len(view) - 8):
        raise ImageError(f"its header claims {length} of {len(view)} bytes", code="BX5047")
    head = bytes(view[: 8 + length])
    try:
        text = json.loads(head[8:])
        facts = json.loads(text.pop("__metadata__")["facts"])
        entries = {name: _entry(name, found, 8 + length) for name, found in text.items()}
    except BROKEN as error:
        raise ImageError("its header cannot be read", code="BX5048") from error
    if not isinstance(facts, dict):
        raise ImageError("its header cannot be read", code="BX5049")
    size = max((entry.end for entry in entries.values()), default=len(head))
    if size > len(view):
        cut = min((e for e in entries.values() if e.end > len(view)), key=lambda e: e.start)
        raise ImageError(
            f"it ends inside tensor {cut.name!r}: expected {size} bytes, found {len(view)}",
            code="BX5050",
        )
    return ImageLayout(head, entries, facts, size)


def _entry(name: str, found: Mapping[str, Any], base: int) -> TensorEntry:
    start, end = found["data_offsets"]
    entry = TensorEntry(
        name, found["dtype"], tuple(int(n) for n in found["shape"]), base + int(start)
    )
    if start < 0 or entry.size != end - start or any(n < 0 for n in entry.shape):
        raise ValueError(f"the bytes of {name!r} are not as many as its shape says")
    return entry
