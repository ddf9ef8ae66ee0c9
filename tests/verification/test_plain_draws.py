"""What a model draws in the first link of `verify`: by whom, and in regions of autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.verification.dice import KeyedDice
from tests.verification.test_plain import first, split


class TwoHolders(nn.Module):
    """Two parts hold one module that draws."""

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(0.5)
        self.a, self.b = nn.Sequential(drop), nn.Sequential(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_module_of_two_names_draws_under_the_name_that_it_is_called_by() -> None:
    dice, model = KeyedDice(), TwoHolders()
    dice.know(model)
    assert dice._path_of(model.a[0]) == "a.0"
    dice.stack.append("b")
    assert dice._path_of(model.a[0]) == "b.0"


CAST = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def part(self, x):
        x = self.drop(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.drop(torch.tanh(self.drop(x))).float()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.drop(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = self.drop(x.float())
            x = checkpoint(lambda h: self.drop(h), x, use_reentrant=False)
        x = checkpoint(self.part, x.float(), use_reentrant=False)
        return self.drop(self.second(x)).pow(2).mean()


def model():
    return Cast()


def example_batch():
    return (torch.randn(4, 6),)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    ["", pytest.param('autocast = "bfloat16"\n', marks=pytest.mark.nightly)],
    ids=["", "of the file"],
)
def test_draws_in_regions_of_autocast_are_one_each(more: str, tmp_path: Path) -> None:
    """Checkpoints in them, and they in checkpoints, draw twice alike."""
    path = tmp_path / "cast.py"
    path.write_text(CAST + more)
    found = verify(split(path), steps=2)
    assert first(found).passed, str(found)
