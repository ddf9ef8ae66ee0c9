"""A folder of torch.distributed.checkpoint -> its tensors and values by key; nothing of it is run.

    .metadata       a pickle: keys, shapes, and in which file each chunk of a tensor is
    __0_0.distcp    what one process wrote: an archive of torch.save a chunk

The pickle is read by a table of the names that torch puts there. This file reads places; it
knows no models and imports no torch. Format: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from bigbrain_fx.errors import InputError
from bigbrain_fx.weights.archive import (
    FileRange,
    SavedTensor,
    TableUnpickler,
    UnknownCallError,
    read_archive,
)
from bigbrain_fx.weights.stored import CODES, DTYPES, Stored, require_regular

METADATA = ".metadata"
_PIECE = 1 << 22  # bytes
_CHECKPOINT = "torch.distributed.checkpoint"


@dataclass(frozen=True, slots=True)
class SpreadTensor(Stored):
    """A tensor in chunks: boxes of it, each in an archive of its own; `file` is the metadata's."""

    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], FileRange], ...]  # offsets, sizes, where

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes, row by row.

        Raises:
            InputError: a chunk is damaged, or the chunks are not the whole.
        """
        runs = sorted(run for chunk in self.chunks for run in self._runs(chunk))
        ends = [(0, 0), *((at, at + n) for at, n, *_ in runs), (self.size, self.size)]
        if any(one[1] != other[0] for one, other in pairwise(ends)):
            raise _broken(
                self.file,
                f"the chunks of {self.key!r} are not the whole tensor, each part once",
                code="BX3711",
            )
        for _, size, file, start in runs:
            yield from _read(Path(file), start, size)

    def scalar(self) -> int | float | bool | None:
        """Return the number that it is, if it has no dimensions."""
        return self._raw(self.chunks[0][1], self.chunks[0][2]).number() if self.chunks else None

    def _raw(self, sizes: tuple[int, ...], where: FileRange) -> SavedTensor:
        found = read_archive(where)
        if not isinstance(found, SavedTensor) or (found.dtype, found.shape) != (self.dtype, sizes):
            raise _broken(
                where.file,
                f"it has another tensor than its index says of {self.key!r}",
                code="BX3712",
            )
        return found

    def _runs(
        self, chunk: tuple[tuple[int, ...], tuple[int, ...], FileRange]
    ) -> Iterator[tuple[int, int, str, int]]:
        """Yield the bytes of a chunk that follow one another in the whole, too."""
        offsets, sizes, where = chunk
        at = self._raw(sizes, where).where
        cut = max((d for d, n in enumerate(self.shape) if sizes[d] != n), default=0)
        inner = math.prod(self.shape[cut + 1 :]) * DTYPES[CODES[self.dtype]][1]
        length = inner * math.prod(sizes[cut : cut + 1])
        steps = [math.prod(self.shape[d + 1 : cut + 1]) * inner for d in range(cut + 1)]
        rows = product(*(range(o, o + n) for o, n in zip(offsets[:cut], sizes[:cut], strict=True)))
        first = offsets[cut] * inner if self.shape else 0
        for number, row in enumerate(rows if length else ()):
            start = first + sum(i * step for i, step in zip(row, steps, strict=False))
            yield start, length, str(at.file), at.start + number * length


@dataclass(frozen=True)
class DistributedCheckpoint:
    """Contents of a folder, by flat key.

    Attributes:
        paths: key -> where it was in the nested dict that was saved; a key of its own else.
    """

    path: Path
    tensors: Mapping[str, SpreadTensor]
    values: Mapping[str, FileRange]
    paths: Mapping[str, tuple[str | int, ...]]

    def value(self, key: str) -> Any:  # noqa: ANN401  # numbers, words, lists of them
        """Return a value that is no tensor; one with a number in a tensor: that number.

        Raises:
            InputError: it is no plain data.
        """
        found = read_archive(self.values[key])
        return found.number() if isinstance(found, SavedTensor) else found


def is_distributed(path: str | Path) -> bool:
    """Whether a path is a folder of torch.distributed.checkpoint."""
    return (Path(path) / METADATA).is_file()


def read_distributed(path: str | Path) -> DistributedCheckpoint:
    """Read what is where in a checkpoint; the numbers stay on disk.

    Raises:
        InputError: there is none; its metadata name what no checkpoint needs, or are damaged.
    """
    folder = Path(path).resolve()
    found = _metadata(folder / METADATA)
    try:
        places = {(i.fqn, _sizes(i.offset)): s for i, s in found.storage_data.items()}
        tensors, values = {}, {}
        for key, entry in found.state_dict_metadata.items():
            if isinstance(entry, _Bytes):
                values[key] = _place(folder, places[key, ()])
                continue
            chunks = [(_sizes(c.offsets), _sizes(c.sizes)) for c in entry.chunks]
            where = [_place(folder, places[key, offsets]) for offsets, _ in chunks]
            whole = tuple((*chunk, at) for chunk, at in zip(chunks, where, strict=True))
            tensors[key] = SpreadTensor(
                folder / METADATA, key, entry.properties.dtype, _sizes(entry.size), 0, whole
            )
            _require_boxes(tensors[key])
        paths = {key: tuple(p) for key, p in (found.planner_data or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(folder / METADATA, "its entries cannot be read", code="BX3713") from error
    own = {key: paths.get(key, (key,)) for key in (*tensors, *values)}
    return DistributedCheckpoint(folder, tensors, values, own)


def _require_boxes(tensor: SpreadTensor) -> None:
    if tensor.dtype not in CODES:
        raise ValueError(tensor.dtype)
    for offsets, sizes, _ in tensor.chunks:
        for offset, size, whole in zip(offsets, sizes, tensor.shape, strict=True):
            if not 0 <= offset <= offset + size <= whole:
                raise ValueError(tensor.key)


def _sizes(found: Any) -> tuple[int, ...]:  # noqa: ANN401  # as the metadata have it
    return () if found is None else tuple(int(n) for n in found)


def _place(folder: Path, info: _State) -> FileRange:
    name = info.relative_path
    if PurePath(name).name != name:
        raise _broken(
            folder / METADATA, f"it names the file {name!r}, expected one beside it", code="BX3714"
        )
    if getattr(info, "transform_descriptors", None):
        raise _broken(
            folder / METADATA, f"{name} was written by an extension of its own", code="BX3715"
        )
    return FileRange(folder / name, int(info.offset), int(info.length))


def _metadata(path: Path) -> _State:
    try:
        require_regular(path)
        with path.open("rb") as file:
            found = TableUnpickler(file, _TABLE).load()
    except OSError as error:
        raise InputError(
            f"expected a checkpoint of torch.distributed.checkpoint, cannot read {path}: "
            f"{error.strerror or error}",
            code="BX3716",
            help="give the folder that dcp.save wrote",
        ) from error
    except UnknownCallError as error:
        raise InputError(
            f"{METADATA} names {error}, which no checkpoint needs: not read, since a pickle may "
            "run anything",
            code="BX3717",
            at=str(path),
            help="save it again with torch.distributed.checkpoint.save and its own planner",
        ) from error
    except Exception as error:  # a damaged pickle fails in any way
        raise _broken(path, "it is no pickle of a checkpoint's metadata", code="BX3718") from error
    if not isinstance(found, _State):
        raise _broken(path, "it is no checkpoint's metadata", code="BX3719")
    return found


def _read(path: Path, start: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while size:
            data = file.read(min(size, _PIECE))
            if not data:
                raise _broken(path, "it ends inside a tensor", code="BX3720")
            size -= len(data)
            yield data


def _broken(path: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"{path.name} cannot be read: {why}",
        code=code,
        at=str(path),
        help="copy the checkpoint again",
    )


# --------------------------------------------------------------------------- what the pickle names


class _State(SimpleNamespace):
    """Stands for any of torch's dataclasses: its fields, and nothing that it can do."""


class _Bytes(_State):
    pass


class _Properties(_State):
    def __setstate__(self, state: Any) -> None:  # noqa: ANN401  # a tuple: the dtype is its first
        self.dtype = state[0]


class _Index(_State):
    offset = None  # of what is no tensor

    def __hash__(self) -> int:  # type: ignore[override]  # one of a pickle is a key there
        return id(self)


def _plain(*words: object) -> tuple[object, ...]:
    """Stand for what is not looked at: a layout, a memory format, a path."""
    return words


_TABLE: Mapping[tuple[str, str], Any] = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): _State,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): _State,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _State,
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Properties,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _State,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _plain,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _State,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _plain,
    ("pathlib", "PosixPath"): _plain,
    ("pathlib", "WindowsPath"): _plain,
    ("pathlib._local", "PosixPath"): _plain,
    ("collections", "OrderedDict"): dict,
}
