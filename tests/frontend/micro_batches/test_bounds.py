"""A bound of a mean over rows: micro-batches agree with their batch until some of them pass it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import MicroBatchEffect, Training, capture, micro_batch_effect

ROWS, LEVEL, HOTTEST = 8, 0.01, 100.0


class Rows(nn.Module):
    """Its rows stand alone, and are scaled, as by CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(x) * self.scale.exp().clamp(max=HOTTEST)
        return found


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def flooded(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Ishida's flooding: the loss does not fall below a level, which a later step reaches."""
    return (mean(output, batch) - LEVEL).abs() + LEVEL


def flooded_by_row(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = (output - batch["y"]).square().mean(1)
    return ((losses - LEVEL).abs() + LEVEL).mean()


def effect(loss: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> MicroBatchEffect:
    torch.manual_seed(0)
    model, batch = Rows(), {"x": torch.randn(ROWS, 4), "y": torch.randn(ROWS, 4)}
    return micro_batch_effect(Training(model, loss, None, None), capture(model, batch, loss), 4)


def test_a_bound_of_a_mean_is_named_before_parts_pass_it() -> None:
    found = effect(flooded)
    assert (found.differs, found.is_equal) == (True, True)
    assert "test_bounds.py:" in found.cause


def test_a_bound_of_a_parameter_is_the_same_for_all_parts() -> None:
    assert not effect(mean).differs


def test_a_bound_of_each_row_is_that_of_the_batch() -> None:
    assert not effect(flooded_by_row).differs
