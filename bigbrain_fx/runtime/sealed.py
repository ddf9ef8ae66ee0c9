"""Messages of replaced processes: bytes that carry a checksum of themselves; see `checksum`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .checksum import WORD, hashed


def sealed_length(nbytes: int) -> int:
    """Return the bytes that a sealed payload of `nbytes` takes."""
    return -(-nbytes // WORD) * WORD + WORD


def seal(payload: Tensor) -> Tensor:
    """Return a copy of a 1-d tensor of bytes, with its checksum."""
    length = payload.numel()
    end = sealed_length(length) - WORD
    sealed = torch.empty(end + WORD, dtype=torch.uint8)
    sealed[:length].copy_(payload)
    if end > length:
        sealed[length:end].zero_()
    ctypes.memmove(sealed.data_ptr() + end, _checksum(sealed, length), WORD)
    return sealed


def is_whole(sealed: Tensor, nbytes: int) -> bool:
    """Whether what `seal` made of `nbytes` bytes has arrived as it left."""
    end = sealed.numel() - WORD
    return ctypes.string_at(sealed.data_ptr() + end, WORD) == _checksum(sealed, nbytes)


def _checksum(sealed: Tensor, nbytes: int) -> bytes:
    return hashed(sealed.view(torch.int64), sealed.numel() // WORD - 1, nbytes)
