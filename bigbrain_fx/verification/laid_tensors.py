"""Tensors in a file with how they lie in memory: kernels round by it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors and how they lie in memory: kernels round by it, by strides of size 1, too."""
    lying = {name: tensor.stride() for name, tensor in tensors.items() if not _repeats(tensor)}
    flat = {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}
    said = {"strides": json.dumps(lying), "names": json.dumps(list(tensors))}
    save_file(flat, path, said)


def _repeats(tensor: Tensor) -> bool:
    """Whether elements share memory: nothing can be copied into such a tensor."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def read(path: Path) -> dict[str, Tensor]:
    """Read what `save` wrote, in its order, each tensor in memory of its own."""
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
        lying = json.loads(said["strides"])
        found = {name: file.get_tensor(name) for name in json.loads(said["names"])}
    return {name: laid(tensor, lying.get(name)) for name, tensor in found.items()}


def laid(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a copy with these strides; row by row without."""
    if strides is None:
        return tensor.clone()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
