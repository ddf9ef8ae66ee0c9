"""The caller's own module while devices train copies of it; each read gets their weights first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class CallersModule:
    """Calls `refresh` before the module computes, and before its `state_dict` is read.

    Args:
        module: the caller's.
        refresh: gives it the weights of now.
    """

    def __init__(self, module: nn.Module, refresh: Callable[[], None]) -> None:
        hook = _Hook(refresh)
        self._handles = (
            module.register_forward_pre_hook(hook),
            module.register_state_dict_pre_hook(hook),
        )

    def leave(self) -> None:
        """Let the module be as the caller made it."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook of a module; in a copy of the module, such as an average, it does nothing."""

    def __init__(self, refresh: Callable[[], None] | None = None) -> None:
        self._refresh = refresh
        self._is_within = False

    def __call__(self, *_: object) -> None:
        if self._refresh is None or self._is_within:
            return
        self._is_within = True
        try:
            self._refresh()
        finally:
            self._is_within = False

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
