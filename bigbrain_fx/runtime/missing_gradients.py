"""Backward passes that come to a value without a gradient for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ANN401  # torch's own
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # noqa: ANN401
        return None


def nothing_of(value: Tensor) -> Tensor:
    """Return what a backward starts from that comes to a value without a gradient for it.

    To leave the value out would not do: a Function before it is run all the same, given zeros.
    """
    found: Tensor = _Nothing.apply(value)  # type: ignore[no-untyped-call]  # torch has it so
    return found
