"""Tensors -> bytes and safetensors files, with torch alone.

safetensors' own writer for torch needs numpy, which neither torch nor a bundle needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .image import Entry, layout_of

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


def raw(tensor: Tensor) -> bytearray:
    """Return a copy of a tensor's elements, row by row, as bytes."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    room = bytearray(flat.numel())
    if room:
        torch.frombuffer(room, dtype=torch.uint8).copy_(flat)
    return room


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file; one tensor at a time is copied.

    Raises:
        KeyError: the format has no such element type.
    """
    entries = [Entry(name, CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    layout = layout_of(entries, {})
    with path.open("wb") as file:
        file.write(layout.head)
        for name in layout.entries:
            file.write(raw(tensors[name]))
