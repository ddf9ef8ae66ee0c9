"""`.data` in the user's lines while a model is traced: read as .detach(), set by writing into it.

A trace does not see torch's own `.data`. What differs is that autograd does not count a write
through it: where a backward reads what was written so, the trace's gradients are not the model's,
and the comparison of both says so. Where nothing is compared, `.data` is refused. Public code that
has it: MoCo's key encoder, `param_k.data = param_k.data * self.m + param_q.data * (1. - self.m)`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.frontend.translation.sources import is_users
from bigbrain_fx.frontend.translation.trace_refusals import BY_DATA

_OWN: Any = torch._C.TensorBase.data


@contextlib.contextmanager
def data_seen() -> Iterator[list[str]]:
    """Let a trace see what the user's lines read and write by `.data`; yield those lines."""
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
