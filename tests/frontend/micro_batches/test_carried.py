"""State that a micro-batch writes and the next one reads makes another step of the same rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import Training, capture, leaf, micro_batch_effect


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Taught(Rows):
    """Holds a teacher in a list, and moves its weights in forward, as an EMA does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.up).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, up in zip(self.teacher[0].parameters(), self.up.parameters(), strict=True):
                own.lerp_(up, 0.1)
        return super().forward(x) - self.teacher[0](x)


class Centred(Rows):
    """Subtracts a mean that it remembers, as DINO's teacher does, where it trains."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(super().forward(x), training=self.training)
        found = h - self.centre
        if self.training:
            self.centre.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return found


class Remembered(Rows):
    """An opaque part that adds what it has kept of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Remembers()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


@leaf
class Remembers(nn.Module):
    before: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found = x + self.before
        self.before.copy_(x.detach().mean(0))
        return found


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def batch_of() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 4, generator=dice), "y": torch.randn(8, 4, generator=dice)}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("model", "names"),
    [(Centred, "centre"), (Taught, "constant"), (Remembered, "part")],
)
def test_state_between_micro_batches_is_named(model: type[nn.Module], names: str) -> None:
    own = model()
    captured = capture(own, batch_of(), mean)
    found = micro_batch_effect(Training(own, mean, None), captured, 4)
    assert found.differs
    assert found.is_carried
    assert found.cause.startswith("A micro-batch reads what the one before it wrote")
    assert names in found.cause
    assert "after the others" in found.difference


def test_a_tensor_that_no_module_holds_is_as_it_was_too() -> None:
    """A bundle would begin with the teacher as the comparison has left it."""
    model = Taught()
    found = capture(model, batch_of(), mean)
    before = model.teacher[0].weight.clone()
    assert micro_batch_effect(Training(model, mean, None), found, 4).is_carried
    assert torch.equal(model.teacher[0].weight, before)


class Routed(nn.Module):
    """Experts of which the less used are chosen: a count of all tokens before."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 3), nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        bias = -0.1 * torch.sign(self.counts - self.counts.mean())
        used = F.one_hot((scores + bias).topk(2, -1).indices, 3).sum(1).to(x.dtype)
        self.counts.add_(used.detach().sum(0))
        weights = (scores.sigmoid() * used).unsqueeze(-1)
        found: Tensor = self.out((torch.einsum("bi,eij->bej", x, self.experts) * weights).sum(1))
        return found


@pytest.mark.parametrize("seed", range(3))
def test_a_count_by_which_experts_are_chosen_is_carried_in_some_order(seed: int) -> None:
    """The last micro-batch may choose the same by chance."""
    torch.manual_seed(seed)
    model = Routed()
    found = capture(model, batch_of(), mean)
    assert micro_batch_effect(Training(model, mean, None), found, 2).is_carried
