"""Stages are float32 where they say no type; the user's parts have the model file's default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bigbrain_fx.runtime.kept import part_of
from bigbrain_fx.runtime.modules import Stage


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float32))


class Stage0(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight = nn.Linear(2, 2), nn.Parameter(torch.empty(2))
        self.own, self.other = part_of(model, "0"), part_of(model, "1")


def test_a_default_of_the_model_file_is_not_the_stages() -> None:
    stage = Stage0.empty(torch.device("cpu"))
    found = {name: p.dtype for name, p in stage.named_parameters() if "bias" not in name}
    assert found == {
        "a.weight": torch.float32,
        "weight": torch.float32,
        "own.weight": torch.float64,
        "other.weight": torch.float32,
    }
    assert torch.get_default_dtype() == torch.float64
