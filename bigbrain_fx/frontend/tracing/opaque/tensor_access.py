"""Tensors that some Python code reads, and tensors with values that decide its branches.

    if mask.any(): found = found + extra.mean()       queries `mask`, whose value decides on `extra`
    rows = boxes[mask]; if len(rows): ...             queries the number of rows

Code that queries values may read other tensors next time. The module only observes calls, and knows
no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bigbrain_fx.frontend.translation.batch import tensors_in

VALUES = frozenset(
    (
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__),
        *(Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__),
        *(torch.is_nonzero, Tensor.is_nonzero, torch.equal, Tensor.equal),
        *(torch.allclose, Tensor.allclose, Tensor.__contains__),
    )
)
"""What gives Python a tensor's numbers."""
_SIZES = frozenset(
    (
        *(Tensor.numel, Tensor.nelement, torch.numel, Tensor.size, Tensor.__len__),
        *(
            Tensor.shape.__get__,  # type: ignore[attr-defined]  # a property
            Tensor.__iter__,
            Tensor.unbind,
            torch.unbind,
        ),
    )
)
_FREEZING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_SIZED_BY_DATA = frozenset(
    (
        *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, Tensor.unique),
        *(torch.masked_select, Tensor.masked_select, torch.unique, torch.bincount),
        *(torch.unique_consecutive, Tensor.unique_consecutive, Tensor.bincount),
        *(torch.repeat_interleave, Tensor.repeat_interleave),
    )
)


class TensorReads(TorchFunctionMode):
    """Record every tensor argument of a function or attribute of torch.

    Attributes:
        seen: their ids.
        asks: whether Python has read numbers of one, or a size that depends on numbers.
        freezes: whether Python has read of a parameter whether it has a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.asks = self.freezes = False
        self._sized: dict[int, Tensor] = {}  # held, or another might get the same id

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = list(tensors_in((args, kwargs or {})))
        self.seen.update(map(id, given))
        sized = any(id(tensor) in self._sized for tensor in given)
        self.asks |= func in VALUES or (sized and func in _SIZES)
        self.freezes |= func in _FREEZING and isinstance(args[0], nn.Parameter)
        found = func(*args, **(kwargs or {}))
        if sized or _is_sized_by_data(func, args):
            self._sized.update((id(tensor), tensor) for tensor in tensors_in(found))
        return found

    def numbers(self, given: Sequence[Tensor], apart_from: Sequence[Tensor] = ()) -> set[int]:
        """Return the indices of the tensors that the code reads or, by their values, may read."""
        never = {id(tensor) for tensor in apart_from}
        return {
            i
            for i, tensor in enumerate(given)
            if id(tensor) in self.seen or (self.asks and id(tensor) not in never)
        }


def _is_sized_by_data(func: Callable[..., object], args: tuple[object, ...]) -> bool:
    if func is Tensor.__getitem__:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1:]))
    return func in _SIZED_BY_DATA or (func is torch.where and len(args) == 1)
