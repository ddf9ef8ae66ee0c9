"""Tensors that are laid out otherwise than their channel's first one: copied into its layout."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout as same
from .layout import Layout, LayoutError, stored


def pack(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the elements to send as one dense 1-d tensor, without a copy where the layout allows.

    `layout` is the channel's; a tensor of other strides is first copied into it.

    Raises:
        LayoutError: the channel's layout repeats elements that differ in this tensor.
    """
    tensor = tensor.resolve_conj().resolve_neg()  # numbers travel, no note to turn a sign
    if Layout.of(tensor) == layout:
        return same.pack(tensor, layout)
    _require_room(tensor, layout)
    fresh = torch.empty_strided(
        layout.stored, _dense_strides(layout), dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(stored(tensor, layout)).as_strided((layout.numel,), (1,))


def _overlaps(layout: Layout) -> bool:
    """Whether stored elements may share memory, as the windows that `unfold` gives do."""
    reach = 0
    for step, size in sorted(zip(layout.strides, layout.stored, strict=True)):
        if size != 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _require_room(tensor: Tensor, layout: Layout) -> None:
    """Refuse a tensor whose elements are not repeated where the channel's layout repeats them."""
    repeated = any(
        planned == 0 and size > 1 and step != 0
        for planned, step, size in zip(layout.strides, tensor.stride(), layout.shape, strict=True)
    )
    if repeated or (layout.numel > 0 and not layout.is_dense and _overlaps(layout)):
        raise LayoutError(
            f"the first message had strides {layout.strides}, which repeat elements; "
            f"this one has {tuple(tensor.stride())}: make the value contiguous in the model",
            code="BX5010",
        )


def _dense_strides(layout: Layout) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in the same order as the layout's."""
    if layout.is_dense:
        return layout.strides
    strides, step = [], 1
    for size in reversed(layout.stored):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
