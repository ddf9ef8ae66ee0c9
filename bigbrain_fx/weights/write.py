"""Write a safetensors file piece by piece: no tensor is ever whole in memory.

Element types change on the way as `tensor.to(dtype)` does, without torch. This file copies bytes
from files to a file; it knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bigbrain_fx.weights.stored import CODES, DTYPES, Stored, size_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

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
    write_tensors(path, [(c.name, c.dtype, c.source.shape, _pieces(c)) for c in copies])


Written = tuple[str, str, tuple[int, ...], Iterable[bytes]]  # name, element type, shape, bytes


def write_tensors(path: Path, tensors: Iterable[Written]) -> None:
    """Write tensors, of which a piece at a time is made.

    Raises:
        OSError: the disk is full, or a source has gone.
    """
    # widest elements first keeps every tensor aligned, as safetensors does itself
    ordered = sorted(tensors, key=lambda each: (-DTYPES[CODES[each[1]]][1], each[0]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape, _ in ordered:
        end = start + size_of(shape, dtype)
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for *_, pieces in ordered:
            file.writelines(pieces)


def same_numbers(first: Stored, second: Stored) -> bool:
    """Whether two stored tensors are equal, bit for bit."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    pairs = zip(pieces_of(first), pieces_of(second), strict=True)
    return all(one == other for one, other in pairs)


def _pieces(copy: Copy) -> Iterator[bytes]:
    for data in pieces_of(copy.source):
        yield cast(data, copy.source.dtype, copy.dtype)


def pieces_of(source: Stored, piece: int = PIECE) -> Iterator[bytes]:
    """Yield a stored tensor's bytes.

    Raises:
        OSError: the file is gone, or ends too early.
    """
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


# --------------------------------------------------------------------------- element types

FLOATS = ("float64", "float32", "float16", "bfloat16")


def can_cast(source: str, target: str) -> bool:
    """Whether bytes of one element type can become the other."""
    return source == target or (source in FLOATS and target in FLOATS)


def cast(data: bytes, source: str, target: str) -> bytes:
    """Return the bytes in another element type; both are in `FLOATS`, rounding is to nearest even.

    A float64 reaches 16 bits through float32, as in torch.
    """
    if source == target:
        return data
    import numpy as np  # most commands cast nothing

    numbers = _read(data, source)
    if target == "bfloat16":
        return _bfloat16(numbers.astype(np.float32)).tobytes()
    if target == "float16":
        numbers = numbers.astype(np.float32)
    with np.errstate(over="ignore"):  # too large for 16 bits: infinity, as in torch
        return numbers.astype(target).tobytes()


def _read(data: bytes, dtype: str) -> NDArray[np.floating]:
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype)


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Keep the upper half of each float32, rounded to nearest, ties to even."""
    import numpy as np

    bits = numbers.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def tensors_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, each with a storage of its own."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain.cpu()
    return found
