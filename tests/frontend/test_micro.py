"""Warnings where micro-batches change what is trained; none for a plain model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import capture


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


class Normed(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


class Contrast(Rows):
    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.up(x), dim=1)
        return F.cross_entropy(z @ F.normalize(x, dim=1).T, torch.arange(x.shape[0]))


class Masked(Rows):
    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        return (self.up(x).square() * mask).sum() / mask.sum().clamp(min=1)


class Ignoring(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.up(x), x.argmax(1), ignore_index=0)


class TimeFirst(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.walk = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(x)[0].square().mean()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Rows, None),
        (Normed, "batch norm takes its statistics over a micro-batch"),
        (Contrast, "rows of the batch are compared with each other"),
        (Masked, "the loss is a mean over elements that data choose"),
        (Ignoring, "the loss is a mean over elements that data choose"),
        (TimeFirst, "dimension 0 is taken for the batch"),
    ],
)
def test_what_micro_batches_change_is_said(kind: type[Rows], said: str | None) -> None:
    rows = (8, 3, 4) if kind is TimeFirst else (8, 4)
    found = capture(kind(), (torch.randn(rows),))
    about = [line for line in found.warnings if "the trace holds" not in line]
    if said is None:
        assert found.warnings == ()
        return
    assert len(about) == 1
    assert said in about[0]
    assert about[0].startswith("test_micro.py:")
