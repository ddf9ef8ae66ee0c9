"""Float weights of int8 ones, for as long as a product reads them.

A new tensor each time would leave a hole in the heap for each layer, since the layer's result lies
behind it. A process would hold as much as if its weights were float. Memory is therefore used
again, once nothing, autograd included, has it any more.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = tuple[int, torch.dtype, torch.device]
_free_or_read: dict[Kind, list[torch.UntypedStorage]] = {}


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    """Return `weight * scale`, in memory that no living tensor has."""
    nbytes = weight.numel() * scale.element_size()
    known = _free_or_read.setdefault((nbytes, scale.dtype, scale.device), [])
    storage = next((each for each in known if _is_free(each)), None)
    if storage is None:
        storage = torch.empty_like(weight, dtype=scale.dtype).untyped_storage()
        known.append(storage)
    made: Tensor = scale.new_empty(0)
    made.set_(storage, 0, weight.shape)  # type: ignore[call-overload]  # as torch's documentation has it
    return made.copy_(weight).mul_(scale)  # a product of both would first copy `weight` elsewhere


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether only the list has a storage: views and what autograd saves count as tensors do."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1
