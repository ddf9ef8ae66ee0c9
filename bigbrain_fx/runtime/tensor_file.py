"""Tensors -> bytes and safetensors files, with torch alone.

safetensors' own writer for torch needs numpy, which neither torch nor a bundle needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from .coded import CodedError
from .disk import Disk
from .image import Buffer, TensorEntry, layout_of

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SaveError(CodedError, RuntimeError):
    """Report that tensors cannot be written: which file, why, and what to do."""


class UnnamedFile:
    """A file of tensors that is written and on the disk, but not yet under its name.

    Raises:
        SaveError: it cannot be written; nothing of it is left.
        KeyError: the format has no such element type.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        path: Path,
        disk: Disk | None = None,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        self.path = path
        self.disk = disk or Disk()
        self.before: Path | None = None  # where that is which had the name
        self.is_named = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.part = self.disk.put_aside(path, _pieces(tensors, facts or {}))
        except OSError as error:
            raise self._error(error) from error

    def put(self) -> None:
        """Give the file its name; what is there stays beside it, until `settle`.

        Raises:
            SaveError: the folder is gone, or not ours any more.
        """
        try:
            self.before = self.disk.keep(self.path)
            self.disk.rename(self.part, self.path)
            self.is_named = True
            self.disk.sync(self.path.parent)
        except OSError as error:
            raise self._error(error) from error

    def take_back(self) -> None:
        """Leave the place as it was: this file, or another one, could not be written."""
        with suppress(OSError):
            if self.before is not None:
                self.disk.rename(self.before, self.path)
            elif self.is_named:
                self.disk.remove(self.path)
        self.settle()

    def settle(self) -> None:
        """Remove what is beside the file: all others have their names, or none has."""
        for path in (self.part, self.before):
            with suppress(OSError):
                if path is not None:
                    self.disk.remove(path)

    def _error(self, error: OSError) -> SaveError:
        why = error.strerror or error
        return SaveError(
            f"cannot write {self.path}: {why}: nothing was changed there; give a folder "
            "on a disk with free space, or free some",
            code="BX5171",
        )


def raw(tensor: Tensor) -> bytearray:
    """Return a copy of a tensor's elements, row by row, as bytes."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    room = bytearray(flat.numel())
    if room:
        torch.frombuffer(room, dtype=torch.uint8).copy_(flat)
    return room


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, whole or not at all; one tensor at a time is copied.

    Raises:
        SaveError: the disk is full, or not ours to write on.
        KeyError: the format has no such element type.
    """
    put_all([UnnamedFile(tensors, path)])


def put_all(files: Sequence[UnnamedFile]) -> None:
    """Give files their names: all of them or, where one cannot have it, none.

    Raises:
        SaveError: one cannot.
    """
    try:
        for file in files:
            file.put()
    except SaveError:
        for file in files:
            file.take_back()
        raise
    for file in files:
        file.settle()


def _pieces(tensors: Mapping[str, Tensor], facts: Mapping[str, int]) -> Iterator[Buffer]:
    entries = [TensorEntry(name, CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    layout = layout_of(entries, facts)
    yield layout.head
    for name in layout.entries:
        yield raw(tensors[name])
