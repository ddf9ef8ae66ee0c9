"""What kept parts ask autograd: refused past what they are given, right within."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.opaque.rules import asks_within
from tests.support.captured import assert_same
from tests.support.messages import refused


class Penalty(nn.Module):
    """A penalty on the slope of what it is given, or of what it computes itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.critic = inside, nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scores: Tensor) -> Tensor:
        asked = self.critic(hidden).square() if self.inside else scores
        (slope,) = torch.autograd.grad(asked.sum() + scores.sum() * 0, hidden, create_graph=True)
        return slope.square().mean()


class Model(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.head, self.penalty = nn.Linear(4, 4), nn.Linear(4, 4), Penalty(inside)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x)
        scores = self.head(hidden).square() if not self.penalty.inside else self.head(x)
        return scores.mean() + self.penalty(hidden, scores)


def test_a_leaf_that_asks_past_what_it_is_given_is_refused() -> None:
    with refused("BX0186", CaptureError):
        capture(Model(inside=False), (torch.randn(4, 4),), leaves=["Penalty"])


def test_a_leaf_that_asks_within_is_right() -> None:
    model = Model(inside=True)
    assert_same(model, capture(model, (torch.randn(4, 4),), leaves=["Penalty"]), model)


def test_a_backward_into_what_was_given_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    given = (weight * 2).sum()
    with asks_within([given], "it"), refused("BX0186", CaptureError):
        (given * 3).backward()
    assert weight.grad is None
    with asks_within([given], "it"):
        torch.autograd.grad(given * 3, given)
