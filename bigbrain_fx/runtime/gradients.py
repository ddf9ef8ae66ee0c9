"""The gradients of one step: made, added up over stages, measured and clipped. It knows no device.

Sums are taken in the order of an unsplit backward pass, so that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .only_holder import is_dense

Parts = Mapping[tuple[str, int], Tensor]  # (parameter, stage) -> sum over micro-batches


def gradients(
    roots: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input, a tensor or its place in the graph; None: none reaches it.

    Those of parameters are what their hooks leave of them: see `BackwardDevice._adder`.
    """
    if not roots or not inputs:
        return (None,) * len(inputs)
    both = cast(Sequence[Tensor], inputs)  # torch takes them mixed, too
    return torch.autograd.grad(roots, both, seeds, allow_unused=True)


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


def summed(parts: Parts, stages_of: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one.

    Args:
        parts: of this device's stages and, of tied parameters, of others'.
        stages_of: parameter -> the stages that hold it, last first: autograd's order.
    """
    found = {}
    for name, stages in stages_of.items():
        total = None
        for part in (parts.get((name, stage)) for stage in stages):
            if part is not None:
                total = part if total is None else total + part
        if total is not None:
            found[name] = total
    return found


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient laid out as autograd lays out `.grad`; a new tensor where it was otherwise.

    That is as the parameter is, or row by row. A norm adds in the order of memory, and an optimizer
    may write into what lies there once only.
    """
    if gradient.layout != torch.strided:
        return gradient
    like = parameter.stride() if is_dense(parameter) else torch.empty(gradient.shape).stride()
    sizes = zip(gradient.stride(), like, gradient.shape, strict=True)
    if all(own == step or size == 1 for own, step, size in sizes):
        return gradient
    made = torch.empty_strided(gradient.shape, like, dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)


def norm(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a gradient's norm; zero if there is none."""
    if gradient is None:
        return torch.zeros((), device=parameter.device)
    found: Tensor = torch.linalg.vector_norm(gradient)
    return found


def clipped(
    found: Mapping[str, Tensor], norms: Sequence[Tensor], limit: float
) -> dict[str, Tensor]:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        found: this device's gradients.
        norms: of all devices' gradients, in the order of the model.
        limit: of all of them together.
    """
    factor = clip_factor(norms, limit)
    return {name: gradient * factor for name, gradient in found.items()}


def clip_factor(norms: Sequence[Tensor], limit: float) -> Tensor:
    """Return what gradients are multiplied with, where all of them have these norms."""
    whole = torch.linalg.vector_norm(torch.stack(list(norms)))
    return torch.clamp(limit / (whole + 1e-6), max=1.0)
