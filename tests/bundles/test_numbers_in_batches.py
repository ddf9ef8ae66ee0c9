"""A count of a batch that is a Python number: split, divided over micro-batches, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles import verify
from bigbrain_fx.plan import Options
from tests.support.bundles import cluster

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def model():
    return Net()


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randint(-1, 5, (12,), generator=generator)
        yield {"x": torch.randn(12, 6, generator=generator), "y": y, "ntokens": int((y >= 0).sum())}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    own = F.cross_entropy(output, batch["y"], ignore_index=-1, reduction="sum")
    return own / batch["ntokens"]
"""


@pytest.mark.nightly
def test_a_bundle_divides_a_count_and_trains_the_whole_batch(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    made = bb.split(file, cluster(), tmp_path / "bundle", Options(micro_batches=3))
    assert made.plan.source.divided == ("ntokens",)
    found = {check.name: check.word for check in verify(made.bundle, steps=3).checks}
    assert found.pop("whole batch = micro-batches") == "to rounding"
    assert set(found.values()) == {"equal"}
