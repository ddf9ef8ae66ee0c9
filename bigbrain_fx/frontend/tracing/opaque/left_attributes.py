"""Attributes that a call of an opaque module leaves for others to read: an auxiliary loss, say.

    self.aux = loss     in the module ─▶ one more output of its op ─▶ `self.moe.aux` of its parent

An attribute that the next call reads itself is state, which is refused: no state dict finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH
from bigbrain_fx.frontend.translation.kept import place


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return what a module and those within keep beside parameters, buffers and parts, by path."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in OF_TORCH
    }


def left_by(
    module: nn.Module, before: Mapping[str, object], read: Collection[int]
) -> dict[str, object]:
    """Return the attributes with tensors that a call has set anew, those of modules within, too.

    A list that the call has lengthened is none of them: nobody empties it on a device.

    Args:
        module: the one that was called.
        before: its plain attributes then.
        read: ids of the tensors that the call has read: an attribute of before is state.
    """
    state = {name for name in before if any(id(t) in read for t in tensors_in(before[name]))}
    new = {n: v for n, v in plain_attributes(module).items() if v is not before.get(n, _NOTHING)}
    return {name: value for name, value in new.items() if name not in state and tensors_in(value)}


_NOTHING = object()


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a value; none of one that no op can give."""
    found: list[Tensor] = []
    with contextlib.suppress(CaptureError):
        place(value, found)
        return found
    return []


def set_attributes(module: nn.Module, values: Mapping[str, object]) -> None:
    """Set attributes by path, as a call would have left them."""
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        vars(module.get_submodule(owner))[name] = value
