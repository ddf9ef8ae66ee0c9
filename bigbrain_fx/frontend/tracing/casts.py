"""Casts of a module in its own forward that change nothing: let be while a model is traced.

`self.gate = self.gate.to(x.dtype)` moves parameters, which a trace cannot do; where they have that
type already there is nothing to move. This file knows modules; it knows no graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_BY_NAME = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}


@contextlib.contextmanager
def idle_casts() -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like return the module as it is where it fits."""
    names = ("to", *_BY_NAME)
    kept: dict[str, Any] = {name: getattr(nn.Module, name) for name in names}
    for name, own in kept.items():
        setattr(nn.Module, name, _idle(own, _BY_NAME.get(name)))
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(nn.Module, name, own)


def _idle(own: Callable[..., nn.Module], named: torch.dtype | None) -> Callable[..., nn.Module]:
    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401  # as torch has it
        dtype, device = named, None
        if named is None:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
            if layout is not None:
                return own(self, *args, **kwargs)
        return self if _fits(self, device, dtype) else own(self, *args, **kwargs)

    return cast


def _fits(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether every tensor of a module is there, and every float has that type."""
    return all(
        device in (None, tensor.device)
        and (
            dtype in (None, tensor.dtype) or not (tensor.is_floating_point() or tensor.is_complex())
        )
        for tensor in (*module.parameters(), *module.buffers())
    )
