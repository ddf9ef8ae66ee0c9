"""Tensors as a safetensors file takes them: none shares memory with another, and none is a view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
