"""A plain PyTorch loop whose passes compute with older weights, as `--asynchronous` says.

The recurrences and nothing of ours: `tests/verification/test_asynchronous.py` holds a bundle
against `Stale`, and `tools.studies.asynchronous` trains by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

Batch: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Any, Batch], Tensor]


@dataclass
class Stale:
    """A plain PyTorch model whose passes compute with older weights.

    Attributes:
        input: the entry of a batch that the model reads.
        behind: parameter -> how many updates the weights are older that its passes compute with.
        is_each: each micro-batch is an update, not each step.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    input: str
    behind: Mapping[str, int]
    is_each: bool = False
    history: deque[dict[str, Tensor]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.history = deque([weights_of(self.model)], maxlen=1 + max(self.behind.values()))

    def step(self, micros: Sequence[Batch]) -> float:
        """Train on a batch; return its loss, the mean of its micro-batches'."""
        updates = [[micro] for micro in micros] if self.is_each else [micros]
        return sum(map(self._update, updates)) / len(updates)

    def _update(self, micros: Sequence[Batch]) -> float:
        losses = [self._add_gradients(micro, len(micros)) for micro in micros]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(weights_of(self.model))
        return sum(losses) / len(losses)

    def _add_gradients(self, micro: Batch, count: int) -> float:
        newest = len(self.history) - 1
        weights = {
            name: self.history[max(0, newest - back)][name].clone().requires_grad_()
            for name, back in self.behind.items()
        }
        loss = self.loss(functional_call(self.model, weights, (micro[self.input],)), micro)
        (loss / count).backward()
        for name, parameter in self.model.named_parameters():
            before, made = parameter.grad, weights[name].grad
            parameter.grad = made if before is None or made is None else before + made
        return float(loss.detach())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def behind_of(mode: str, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Return how many updates old each parameter's version is."""
    last = max(stage_of.values())
    back = {"synchronous": 0, "2bw": 1}
    return {name: back.get(mode, last - stage) for name, stage in stage_of.items()}
