"""The gradients of one step, added up in the order of an unsplit backward pass, and clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .channel import is_dense
from .coded import MisuseError
from .modules import HeldWeights

Parts = Mapping[tuple[str, int], Tensor]  # (parameter, stage) -> sum over micro-batches


def gradients(
    roots: Sequence[Tensor], inputs: Sequence[Any], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input, a tensor or its place in the graph; None: none reaches it.

    Gradients of parameters are the results of their hooks: see `PipelineDevice._adder`.
    """
    if not roots or not inputs:
        return (None,) * len(inputs)
    return torch.autograd.grad(roots, inputs, seeds, allow_unused=True)


def summed(parts: Parts, stages_of: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one, over its stages, last one first."""
    found = {}
    for name, stages in stages_of.items():
        total = None
        for part in (parts[name, stage] for stage in stages if (name, stage) in parts):
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
    nothing = torch.zeros((), device=parameter.device)
    return nothing if gradient is None else torch.linalg.vector_norm(gradient)


def clipped(
    found: Mapping[str, Tensor], norms: Sequence[Tensor], limit: float
) -> dict[str, Tensor]:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does; `norms` are of the whole model."""
    factor = clip_factor(norms, limit)
    return {name: gradient * factor for name, gradient in found.items()}


def clip_factor(norms: Sequence[Tensor], limit: float) -> Tensor:
    """Return what gradients are multiplied with, where all of them have these norms."""
    whole = torch.linalg.vector_norm(torch.stack(list(norms)))
    return torch.clamp(limit / (whole + 1e-6), max=1.0)


@dataclass
class StepSums:
    """One step's.

    Attributes:
        held: whose gradients they are.
        losses: by micro-batch.
        gradients: of each parameter and stage, what is added up so far.
        norms: of gradients, by the name that has an owner.
    """

    held: HeldWeights
    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """Return the mean loss of the micro-batches; 16 bits are added in 32."""
        losses = [self.losses[micro] for micro in sorted(self.losses)]
        return torch.stack([x.float() if x.dtype.itemsize < 4 else x for x in losses]).mean()

    def add(self, name: str, stage: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter, laid out as `.grad` would be.

        The first is copied: autograd may hand out one tensor twice, and we write into it.
        """
        key, like = (name, stage), self.held.parameters.get(name)
        if key in self.gradients:
            self.gradients[key].add_(gradient)
        else:
            self.gradients[key] = (gradient if like is None else laid_out(gradient, like)).clone()

    def summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        stages_of = {name: self.held.stages_of(name) for name in self.held.parameters}
        return summed(self.gradients, stages_of)

    def own_norms(self) -> Tensor:
        """Return the norms of the gradients that this device answers for, and keep them."""
        found = self.summed()
        owned = self.held.owned_by(self.held.device)
        names = map(self.held.parameter_of, owned)
        norms = [self._norm(found.get(name), self.held.parameters[name]) for name in names]
        self.norms.update(zip(owned, norms, strict=True))
        return torch.stack(norms)

    def _norm(self, gradient: Tensor | None, parameter: Tensor) -> Tensor:
        return norm(gradient, parameter)

    def take_norms(self, device: str, norms: Tensor) -> None:
        """Take the norms of the gradients that another device answers for."""
        self.norms.update(zip(self.held.owned_by(device), norms.unbind(), strict=True))

    def all_norms(self) -> list[Tensor]:
        """Return the norms of all gradients of the model, in its order."""
        if not self.norms:
            self.own_norms()
        lacking = [owner for name, owner in self.held.owner.items() if name not in self.norms]
        if lacking:
            text = f"clipping needs the norms of device {lacking[0]}, which sends none: split the "
            raise MisuseError(text + "model again with clip_norm in its file", code="BX5162")
        return [self.norms[name] for name in self.held.owner]

    def clear(self) -> None:
        """Forget the gradients: they were used."""
        self.gradients.clear()
