"""The caller's own module while devices train copies of it; each read gets their weights first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class CallersModule:
    """Calls `refresh` before the module computes, and before its tensors are read through it.

    A tensor that the caller holds, of a list made before, is not read through the module.

    Args:
        module: the caller's.
        refresh: gives it the weights of now.
    """

    def __init__(self, module: nn.Module, refresh: Callable[[], None]) -> None:
        self.module, self._look = module, _Look(refresh)
        self._handle = module.register_forward_pre_hook(self._look)  # layers may hold theirs, too
        for part in module.modules():
            part._parameters = _Tensors(part._parameters, self._look)
            part._buffers = _Tensors(part._buffers, self._look)

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Let reads in the block find the tensors as they are."""
        before, self._look.is_within = self._look.is_within, True
        try:
            yield
        finally:
            self._look.is_within = before

    def leave(self) -> None:
        """Let the module be as the caller made it."""
        self._handle.remove()
        for part in self.module.modules():
            part._parameters = dict(part._parameters)
            part._buffers = dict(part._buffers)


class _Look:
    """Refreshes a module; in a copy of it, such as an average, it does nothing."""

    def __init__(self, refresh: Callable[[], None] | None = None) -> None:
        self._refresh = refresh
        self.is_within = False

    def __call__(self, *_: object) -> None:
        if self._refresh is None or self.is_within:
            return
        self.is_within = True
        try:
            self._refresh()
        finally:
            self.is_within = False

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


class _Tensors(dict[str, Any]):
    """Tensors of a module by name, refreshed when one is read; a copy is a plain dict."""

    def __init__(self, tensors: dict[str, Any], look: _Look) -> None:
        super().__init__(tensors)
        self._look = look

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  # a tensor, or None
        self._look()
        return super().__getitem__(name)

    def items(self) -> Any:  # noqa: ANN401  # a view of dict's own
        """Return names and tensors."""
        self._look()
        return super().items()

    def values(self) -> Any:  # noqa: ANN401  # a view of dict's own
        """Return the tensors."""
        self._look()
        return super().values()

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return dict, ([*self.items()],)
