"""Count live tensor bytes: every storage that torch makes, from when it is made until it is freed.

The module counts real tensors and fake ones. The module knows nothing of graphs. Memory that a
kernel takes and gives back within one call of aten is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages made inside `with`, in the thread that entered it.

    Attributes:
        now: bytes alive. peak: the most there were since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]]
        self._sizes = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run a call of aten and count its new tensors."""
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for leaf in (found,) if isinstance(found, Tensor) else tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._count(leaf)
        return found

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the storages of some tensors, and of their views."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage, by_bytes: int) -> None:
        """Count a storage's change of size, which no call of aten shows."""
        if storage in self._sizes:
            self._sizes[storage][0] += by_bytes
            self.taken(by_bytes)

    def taken(self, nbytes: int) -> None:
        """Count memory that no storage of torch has; less than 0: it is given back."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> int:
        """Begin a new peak at the bytes that are alive now, and return them."""
        self.peak = self.now
        return self.now

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = self._sizes[storage] = [storage.nbytes()]
        self.now += size[0]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size).atexit = False

    def _gone(self, size: list[int]) -> None:
        self.now -= size[0]
