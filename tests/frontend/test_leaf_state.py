"""What a leaf does with its own buffers: written in place and read as a copy, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same
from tests.support.messages import refused


class Range(nn.Module):
    """A moving range that its first call sets, as observers of quantisation have."""

    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().max()
        self.keep(self.most + seen if self.most.max() < 1e-5 else self.most * 0.9 + seen * 0.1)
        return x.clamp(max=self.read())

    def keep(self, most: Tensor) -> None:
        self.most.copy_(most)

    def read(self) -> Tensor:
        return self.most.clone()


class Assigns(Range):
    def keep(self, most: Tensor) -> None:
        self.most = most


class Saves(Range):
    def read(self) -> Tensor:
        return self.most


class Same(Range):
    """Makes its buffer anew, with the numbers that it has."""

    def keep(self, most: Tensor) -> None:
        self.most = self.most.clone()


class Normed(nn.BatchNorm1d):
    """Saves the running statistics that it writes: torch's own kernel reads no later ones."""


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.first(x)).square().mean()
        return found


@pytest.mark.gate("Normed")
@pytest.mark.parametrize("inner", [Range(), Same(), Normed(4)], ids=lambda m: type(m).__name__)
def test_what_is_kept_in_place_is_right(inner: nn.Module) -> None:
    model = Around(inner)
    assert_same(model, capture(model, (torch.randn(4, 4),), leaves=["inner"]), model)


@pytest.mark.parametrize(
    ("inner", "code"),
    [(Assigns(), "BX0140m"), (Saves(), "BX0140f")],
    ids=["assigns", "saves"],
)
def test_what_a_bundle_would_lose_is_refused(inner: nn.Module, code: str) -> None:
    with refused(code, CaptureError):
        capture(Around(inner), (torch.randn(4, 4),), leaves=["inner"])
