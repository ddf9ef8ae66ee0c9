"""Patches while a model is traced: `.data` is .detach(), casts that change nothing do nothing.

A trace does not see torch's own `.data`. One thing differs: autograd does not count a write through
`.data`. If a backward reads a value that was written so, the trace's gradients are not the model's,
and the comparison of both reports that. Without a comparison, `.data` is refused. Public code that
has it: MoCo's key encoder, `param_k.data = param_k.data * self.m + param_q.data * (1. - self.m)`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.translation.sources import is_users
from bigbrain_fx.frontend.translation.trace_refusals import BY_DATA

_OWN: Any = torch._C.TensorBase.data


@contextlib.contextmanager
def data_seen() -> Iterator[list[str]]:
    """Let a trace see reads and writes of `.data` in the user's lines; yield these lines."""
    seen: list[str] = []

    def read(self: Tensor) -> Tensor:
        if _is_users(sys._getframe(1), seen):
            return self.detach()
        own: Tensor = _OWN.__get__(self)
        return own

    def write(self: Tensor, value: Tensor) -> None:
        if not _is_users(sys._getframe(1), seen):
            _OWN.__set__(self, value)
        elif (self.shape, self.dtype) == (value.shape, value.dtype):
            self.detach().copy_(value.detach())
        else:
            raise BY_DATA.error(seen[-1])

    torch.Tensor.data = property(read, write)  # type: ignore[assignment]  # put back
    try:
        yield seen
    finally:
        del torch.Tensor.data


def _is_users(frame: FrameType, seen: list[str]) -> bool:
    """Whether a line is the user's; note which."""
    file = frame.f_code.co_filename
    if is_users(file):
        seen.append(f"{Path(file).name}:{frame.f_lineno}")
        return True
    return False


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
