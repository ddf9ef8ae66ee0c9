"""Reader of torch.save's files without torch: tensors and plain values, no pickle is run.

    archive/data.pkl   a pickle that rebuilds one object: only the calls below are known here
    archive/data/0     the bytes of a storage, as they are

A pickle is a program. What this one may call is in a table; all else is refused by its name. This
file knows archives; it knows no checkpoints.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bigbrain_fx.errors import InputError
from bigbrain_fx.weights.stored import CODES, DTYPES

SHOWN = 80  # characters of a name that a file gives itself

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_NUMBERS: Mapping[str, str] = {
    **{"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i"},
    **{"int16": "h", "int8": "b", "uint8": "B", "bool": "?"},
}  # how struct calls them


@dataclass(frozen=True, slots=True)
class FileRange:
    """Some bytes of a file."""

    file: Path
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor by its element type and shape, row by row in a range of a file."""

    dtype: str
    shape: tuple[int, ...]
    where: FileRange

    def number(self) -> int | float | bool | None:
        """Return the number of a tensor without dimensions; None: it is no plain number."""
        if self.shape or self.dtype not in _NUMBERS:
            return None
        with self.where.file.open("rb") as file:
            file.seek(self.where.start)
            found: int | float | bool
            (found,) = struct.unpack(f"<{_NUMBERS[self.dtype]}", file.read(self.where.size))
        return found


class UnknownCallError(ValueError):
    """Report what a pickle asks for and may not have."""


class TableUnpickler(pickle.Unpickler):
    """Reads a pickle that names nothing but what a table has: nothing of it is imported.

    Args:
        file: the pickle.
        table: (module, name) -> what stands for it here.
        storages: what a persistent id stands for; None: there are none.
    """

    def __init__(
        self,
        file: IO[bytes],
        table: Mapping[tuple[str, str], Any],
        storages: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file)
        self._table, self._storages = table, storages

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # whatever the table has
        """Return what stands for a name.

        Raises:
            UnknownCallError: the table has none.
        """
        if (module, name) in self._table:
            return self._table[module, name]
        if module == "torch" and name in CODES:
            return name
        raise UnknownCallError(f"{module}.{name}"[:SHOWN])

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401  # as above
        """Return what stands for a storage."""
        if self._storages is None:
            raise UnknownCallError("a storage")
        return self._storages(pid)


def read_archive(where: FileRange) -> Any:  # noqa: ANN401  # a SavedTensor, or plain data
    """Return what torch.save wrote to a range of a file: a tensor, or numbers, words and lists.

    Raises:
        InputError: it holds anything else, is damaged, or cannot be read.
    """
    try:
        with where.file.open("rb") as file, zipfile.ZipFile(_Window(file, where)) as archive:
            entries = {i.filename.partition("/")[2]: i for i in archive.infolist()}
            if entries.get("byteorder") and archive.read(entries["byteorder"]) != b"little":
                raise ValueError("its numbers are not little-endian")

            def storage(pid: Any) -> tuple[str, FileRange]:  # noqa: ANN401  # what the pickle says
                kind, dtype, key, *_ = pid
                if kind != "storage" or not isinstance(dtype, str):
                    raise ValueError("its storages are not torch's")
                return dtype, _bytes_of(file, entries[f"data/{key}"], where)

            text = io.BytesIO(archive.read(entries["data.pkl"]))
            return TableUnpickler(text, _TABLE, storage).load()
    except OSError as error:
        raise InputError(
            f"cannot read {where.file}: {error.strerror or error}",
            code="BX3700",
            help="look at the path",
        ) from error
    except UnknownCallError as error:
        raise InputError(
            f"{where.file.name} holds {error}, which is no tensor and no plain value: not read",
            code="BX3701",
            at=str(where.file),
            help="save tensors, numbers and words alone",
        ) from error
    except Exception as error:  # a damaged pickle, or archive, fails in any way
        raise InputError(
            f"{where.file.name} is not as torch.save wrote it: {str(error)[:SHOWN]}",
            code="BX3702",
            at=str(where.file),
            help="copy the checkpoint again",
        ) from error


def _bytes_of(file: IO[bytes], entry: zipfile.ZipInfo, where: FileRange) -> FileRange:
    """Return where an entry's bytes are: after its own header, which the index only points to."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    file.seek(where.start + entry.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    at = entry.header_offset + 30 + name + extra
    if at + entry.file_size > where.size:
        raise ValueError("it ends inside a tensor")
    return FileRange(where.file, where.start + at, entry.file_size)


def _tensor(
    storage: tuple[str, FileRange],
    first: int,
    shape: Sequence[int],
    stride: Sequence[int],
    *rest: object,
) -> SavedTensor:
    """Stand for torch._utils._rebuild_tensor_v2, and for v3, which names the element type last."""
    kind, room = storage
    named = [word for word in rest if isinstance(word, str)]
    dtype, sizes = (named or [kind])[0], tuple(int(n) for n in shape)
    width = DTYPES[CODES[dtype]][1]
    _require_rows(sizes, tuple(stride))
    start, size = int(first) * width, math.prod(sizes) * width
    if min((first, *sizes), default=0) < 0 or start + size > room.size:
        raise ValueError("a tensor is larger than its storage")
    return SavedTensor(dtype, sizes, FileRange(room.file, room.start + start, size))


def _require_rows(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    expected, step = [], 1
    for size in reversed(shape):
        expected.append(step)
        step *= size
    pairs = zip(shape, stride, reversed(expected), strict=True)
    if step and any(size > 1 and has != want for size, has, want in pairs):
        raise ValueError("a tensor does not lie row by row: save its .contiguous()")


_TABLE: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
}


class _Window(io.RawIOBase):
    """A range of an open file, as a file of its own: an archive's places count from its start."""

    def __init__(self, file: IO[bytes], where: FileRange) -> None:
        self._file, self._where, self._at = file, where, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._where.size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._where.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._where.start + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data
