"""The gradient of each parameter counts, as a bundle's micro-batches add it up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.frontend.micro_batches.test_effect import Rows, effect, masked, mean


def test_a_small_gradient_counts_by_itself() -> None:
    """A head behind a term of weight 1e-4, which is a mean over what a mask leaves: Adam trains it
    as any other.
    """

    class Headed(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return self.up(x), self.head(self.up(x).detach())

    def both(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return mean(output[0], batch) + 1e-4 * masked(output[1], batch)

    def fair(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return mean(output[0], batch) + 1e-4 * mean(output[1], batch)

    torch.manual_seed(0)
    found = effect(Headed(), both)  # type: ignore[arg-type]
    assert found.differs
    assert found.parameter.startswith("head")
    assert effect(Headed(), fair).is_equal  # type: ignore[arg-type]


def test_a_gradient_that_does_not_grow_with_the_loss_is_added_by_each_micro_batch() -> None:
    """An auxiliary loss whose gradient a backward adds as it is, as DeepSeek's experts do."""

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, torch.ones(())

    class Balanced(Rows):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            found: Tensor = Added.apply(h, h.square().mean())  # type: ignore[no-untyped-call]
            return found

    found = effect(Balanced(), mean)
    assert found.differs
    assert "does not grow with the loss" in found.cause
