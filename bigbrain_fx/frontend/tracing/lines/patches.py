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


@contextlib.contextmanager
def idle_casts() -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like return the module as it is where it fits."""
    own: Any = nn.Module._apply

    def applied(module: nn.Module, cast: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: ANN401  # as torch has it
        held = (*module.parameters(), *module.buffers())
        fits = all(_is_kept(tensor, cast) for tensor in held)
        return module if fits else own(module, cast, recurse)

    nn.Module._apply = applied  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


def _is_kept(tensor: Tensor, cast: Callable[[Tensor], Tensor]) -> bool:
    """Whether a cast leaves such a tensor as it is; it gets another one with so many dimensions."""
    probe = torch.empty([2] * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    return cast(probe) is probe
