"""Memory of a caller's weights that the loop holds beside its module, and reads or writes there.

    w = model.head.weight.data      sd = model.state_dict()      w = p.detach().numpy()

Nothing hears of a use of those. As long as there are any, weights come home after each step.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from bigbrain_fx.errors import SplitWarning

if TYPE_CHECKING:
    from torch import Tensor, nn


class Aliases:
    """Tensors beside the module's own that have the memory of its weights.

    Args:
        module: the caller's, before its session holds any of it.
    """

    def __init__(self, module: nn.Module) -> None:
        for other in _ALL:
            other.find()
        self._module, self._found = module, ""
        self._usual: dict[int, int] = {}  # holders of memory that are ours
        self._is_said = False
        if not _ALL:  # else other sessions may hold some, whose loss reads this module
            self.find()

    def enter(self) -> None:
        """Count the holders of now as usual, from now on: sessions hold some of all models."""
        _ALL.add(self)
        self.settle()

    def leave(self) -> None:
        """Look no more."""
        _ALL.discard(self)

    @staticmethod
    def settle() -> None:
        """Accept the holders of now: a session has begun, and holds some, too."""
        for each in _ALL:
            found = _holders(each._module)
            each._usual = {memory: count for memory, (_, count, _) in found.items()}

    def find(self) -> None:
        """Note a tensor that the loop holds, for good."""
        found = _holders(self._module).items() if not self._found else ()
        held = (name for m, (name, count, own) in found if count > self._usual.get(m, own))
        self._found = next(held, self._found)

    def are_there(self) -> bool:
        """Whether the loop holds such memory, or has; warns of it once."""
        self.find()
        if self._found and not self._is_said:
            self._is_said = True
            warnings.warn(
                f"the loop holds memory of {self._found} beside the model (its .data, a "
                "state_dict, a NumPy view), where nobody hears of reads and writes: all weights "
                "come here after each step, which takes time. Hold a .clone(), or read the "
                "model's own each time",
                SplitWarning,
                stacklevel=5,
            )
        return bool(self._found)


_ALL: weakref.WeakSet[Aliases] = weakref.WeakSet()  # of open sessions


def _holders(module: nn.Module) -> dict[int, tuple[str, int, int]]:
    """Return by memory a tensor's name, how many hold it, and how many of these are the module's.

    Those are tensors, and the Python objects by which it is asked.
    """
    import torch

    tensors: dict[int, tuple[str, Tensor]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a session hears of reads, and this is none
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
                tensors.setdefault(id(tensor), (name, tensor))
        stores = [(name, tensor.untyped_storage()) for name, tensor in tensors.values()]
    asked = Counter({id(store): store._cdata for _, store in stores}.values())
    own = Counter(store._cdata for _, store in stores) + asked
    count = torch._C._storage_Use_Count
    return {s._cdata: (name, count(s._cdata), own[s._cdata]) for name, s in stores}
