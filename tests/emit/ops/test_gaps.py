"""Ops of which some results are None, as of a backward that forward asks for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.emitted_stages import emitted_stage


class Weighed(nn.Module):
    """Scales by a gradient's norm: of the weight, or of what a frozen layer is given."""

    def __init__(self, *, of_weight: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 2, 1)
        self.of_weight = of_weight
        self.last.requires_grad_(of_weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        found = self.last(hidden)
        wanted = self.last.weight if self.of_weight else hidden
        (gradient,) = torch.autograd.grad(found.square().mean(), wanted, retain_graph=True)
        return found * gradient.norm().detach()


@pytest.mark.parametrize("of_weight", [True, False])
def test_a_backward_within_forward_gives_what_it_is_asked_for(of_weight: bool) -> None:
    torch.manual_seed(0)
    module, x = Weighed(of_weight=of_weight), torch.randn(4, 2, 5)
    assert torch.equal(emitted_stage(module, x)(x), module(x).square().mean())
