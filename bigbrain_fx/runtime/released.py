"""Tensors without memory: what other replicas, or an offload target, hold meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .modules import HeldWeights


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Let go of the memory of tensors, which stay where they are: `refill` gives it back.

    Values that autograd has saved of these tensors lose their memory, too, and get it back with
    them.
    """
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)


def refill(parameter: torch.Tensor) -> None:
    """Give a tensor that was released memory again, with no numbers in it yet."""
    parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())


def is_released(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory now."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def left_out(held: HeldWeights, module: nn.Module) -> set[str]:
    """Return the weights of a stage that replicas divide; the others get their memory."""
    named = dict(module.named_parameters(remove_duplicate=False))
    empty = {name for name, parameter in named.items() if is_released(parameter)}
    divided = {name for name in empty if held.aliases.get(name, name) in held.owner}
    for name in empty - divided:
        refill(named[name])
    return divided
