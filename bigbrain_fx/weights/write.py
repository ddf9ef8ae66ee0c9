"""Write a safetensors file piece by piece: no tensor is ever whole in memory.

This file copies bytes from files to a file; it knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bigbrain_fx.weights.cast import cast
from bigbrain_fx.weights.distributed import SpreadTensor
from bigbrain_fx.weights.stored import CODES, DTYPES, Stored, size_of

PIECE = 1 << 22  # bytes read at a time; a multiple of every element's size


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor to write: its name, its element type there, and where its bytes are now."""

    name: str
    dtype: str
    source: Stored

    @property
    def size(self) -> int:
        """How many bytes it will have."""
        return size_of(self.source.shape, self.dtype)


def write_file(path: Path, copies: Sequence[Copy]) -> None:
    """Write tensors into one new safetensors file.

    Raises:
        OSError: the disk is full, or a source has gone.
    """
    # widest elements first keeps every tensor aligned, as safetensors does itself
    ordered = sorted(copies, key=lambda copy: (-DTYPES[CODES[copy.dtype]][1], copy.name))
    with path.open("xb") as file:
        file.write(_header(ordered))
        for copy in ordered:
            for piece in _pieces(copy):
                file.write(piece)


def same_numbers(first: Stored, second: Stored) -> bool:
    """Whether two stored tensors are equal, bit for bit."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    pairs = zip(pieces_of(first), pieces_of(second), strict=True)
    return all(one == other for one, other in pairs)


def _header(copies: Sequence[Copy]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for copy in copies:
        entries[copy.name] = {
            "dtype": CODES[copy.dtype],
            "shape": list(copy.source.shape),
            "data_offsets": [start, start + copy.size],
        }
        start += copy.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(copy: Copy) -> Iterator[bytes]:
    for data in pieces_of(copy.source):
        yield cast(data, copy.source.dtype, copy.dtype)


def pieces_of(source: Stored, piece: int = PIECE) -> Iterator[bytes]:
    """Yield a stored tensor's bytes.

    Raises:
        OSError: the file is gone, or ends too early.
    """
    if isinstance(source, SpreadTensor):
        yield from source.pieces()
        return
    left = source.size
    with source.file.open("rb") as file:
        file.seek(source.start)
        while left:
            data = _exactly(file, min(piece, left), source)
            left -= len(data)
            yield data


def _exactly(file: IO[bytes], count: int, source: Stored) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise OSError(None, f"the file ends inside {source.key!r}", str(source.file))
    return data
