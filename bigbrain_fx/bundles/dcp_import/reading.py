"""Contents of a checkpoint of torch.distributed.checkpoint, by key; nothing of its pickles is run.

    .metadata       a pickle: keys, shapes, and in which file each chunk of a tensor is
    __0_0.distcp    what one process wrote: an archive of torch.save a chunk

`torch.load(weights_only=True)` reads the archives. The index is unpickled into torch's own
dataclasses, and names nothing else. The `load` of torch.distributed.checkpoint would run it, and
would leave out what no chunk holds without a word.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from bigbrain_fx.bundles.dcp_import import METADATA
from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import CODES

SHOWN = 80  # characters of what a file says itself
_OF_METADATA = (
    "Metadata TensorStorageMetadata ChunkStorageMetadata BytesStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
)
_CHECKPOINT = "torch.distributed.checkpoint"
_NAMED = {
    *((f"{_CHECKPOINT}.metadata", name) for name in _OF_METADATA.split()),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True)
class Place:
    """Bytes of a file: an archive of torch.save."""

    file: Path
    start: int
    size: int

    def load(self) -> Any:  # noqa: ANN401  # a tensor, or plain data
        """Return what is there.

        Raises:
            InputError: it is neither, is damaged, or cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                archive = io.BytesIO(file.read(self.size))
            return torch.load(archive, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"{self.file.name} holds what is no tensor and no plain value: not read",
                code="BX3701",
                at=str(self.file),
                help="save tensors, numbers and words alone",
            ) from error
        except Exception as error:  # a damaged archive fails in any way
            raise InputError(
                f"{self.file.name} is not as torch.save wrote it: {str(error)[:SHOWN]}",
                code="BX3702",
                at=str(self.file),
                help="copy the checkpoint again",
            ) from error


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor in chunks: boxes of it, each in an archive of its own."""

    index: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], Place], ...]  # offsets, sizes, where

    @property
    def dtype_name(self) -> str:
        """Return its element type by torch's name."""
        return str(self.dtype).removeprefix("torch.")

    def whole(self) -> Tensor:
        """Return the tensor.

        Raises:
            InputError: a chunk is damaged, or the chunks are not the whole.
        """
        made = torch.empty(self.shape, dtype=self.dtype)
        seen = torch.zeros(self.shape, dtype=torch.bool)
        for offsets, sizes, where in self.chunks:
            part = where.load()
            box = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
            is_it = isinstance(part, Tensor) and (part.dtype, part.shape) == (self.dtype, sizes)
            if not is_it or seen[box].any():
                break
            made[box], seen[box] = part, True
        else:
            if seen.all():
                return made
        what = f"the chunks of {self.key!r} are not the whole tensor, each part once"
        raise _broken(self.index, what, code="BX3711")


@dataclass(frozen=True)
class DistributedCheckpoint:
    """Contents of a folder, by flat key.

    Attributes:
        paths: key -> where it was in the nested dict that was saved; a key of its own else.
    """

    path: Path
    tensors: Mapping[str, SpreadTensor]
    values: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]]

    def value(self, key: str) -> Any:  # noqa: ANN401  # numbers, words, lists of them
        """Return a value that is no tensor; one with a number in a tensor: that number.

        Raises:
            InputError: it is no plain data.
        """
        found = self.values[key].load()
        return found.item() if isinstance(found, Tensor) and not found.dim() else found


def read_distributed(folder: Path) -> DistributedCheckpoint:
    """Read what is where in a checkpoint; the numbers stay on disk.

    Raises:
        InputError: there is none; its metadata name what no checkpoint needs, or are damaged.
    """
    index = folder / METADATA
    found = _metadata(index)
    try:
        tensors, values = {}, {}
        for key, entry in found.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                values[key] = _place(index, found.storage_data[MetadataIndex(key)])
            else:
                tensors[key] = _spread(index, key, entry, found.storage_data)
        paths = {key: tuple(path) for key, path in (found.planner_data or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(index, "its entries cannot be read", code="BX3713") from error
    own = {key: paths.get(key, (key,)) for key in (*tensors, *values)}
    return DistributedCheckpoint(folder, tensors, values, own)


def _spread(
    index: Path, key: str, entry: TensorStorageMetadata, stored: Mapping[Any, Any]
) -> SpreadTensor:
    chunks = tuple(
        (tuple(c.offsets), tuple(c.sizes), _place(index, stored[MetadataIndex(key, c.offsets)]))
        for c in entry.chunks
    )
    made = SpreadTensor(index, key, entry.properties.dtype, tuple(entry.size), chunks)
    for offsets, sizes, _ in chunks:
        ends = zip(offsets, sizes, made.shape, strict=True)
        if not all(0 <= offset <= offset + size <= whole for offset, size, whole in ends):
            raise ValueError(key)
    if made.dtype_name not in CODES:
        raise ValueError(made.dtype_name)
    return made


def _place(index: Path, info: Any) -> Place:  # noqa: ANN401  # torch's _StorageInfo
    name = info.relative_path
    if PurePath(name).name != name:
        what = f"it names the file {name!r}, expected one beside it"
        raise _broken(index, what, code="BX3714")
    return Place(index.with_name(name), int(info.offset), int(info.length))


class _UnknownNameError(ValueError):
    """Report what a pickle names and may not have."""


class _Index(pickle.Unpickler):
    """Reads an index: it may name torch's dataclasses of one, types of elements and paths."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # a class or a type
        if module.partition(".")[0] == "pathlib":
            return PurePath  # a WindowsPath cannot be made here
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_torch or (module, name) in _NAMED:
            return super().find_class(module, name)
        raise _UnknownNameError(f"{module}.{name}"[:SHOWN])


def _metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Index(file).load()
        if not isinstance(found, Metadata):
            raise TypeError(type(found))
        return found
    except OSError as error:
        raise InputError(
            f"expected a checkpoint of torch.distributed.checkpoint, cannot read {path}: "
            f"{error.strerror or error}",
            code="BX3716",
            help="give the folder that dcp.save wrote",
        ) from error
    except _UnknownNameError as error:
        raise InputError(
            f"{METADATA} names {error}, which no checkpoint needs: not read, since a pickle may "
            "run anything",
            code="BX3717",
            at=str(path),
            help="save it again with torch.distributed.checkpoint.save and its own planner",
        ) from error
    except Exception as error:  # a damaged pickle fails in any way
        raise _broken(path, "it is no pickle of a checkpoint's metadata", code="BX3718") from error


def _broken(path: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"{path.name} cannot be read: {why}",
        code=code,
        at=str(path),
        help="copy the checkpoint again",
    )
