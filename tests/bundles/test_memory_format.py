"""Weights in channels_last lie so on their devices: convolutions round by it, and are faster."""

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


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 1), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = block(3, 16), block(16, 16)
        self.deep = nn.Sequential(block(16, 16), nn.Upsample(scale_factor=2, mode="bilinear"))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        h = self.up(self.down(x))
        return self.head((h + self.deep(F.max_pool2d(h, 2))).mean((2, 3)))


def model():
    return Net().to(memory_format=torch.channels_last)


def example_batch():
    y = torch.arange(4) % 5
    return {"x": torch.randn(4, 3, 12, 12), "y": y}


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])
"""


@pytest.mark.parametrize(
    "options",
    [
        Options(micro_batches=1, partitioner="naive"),
        pytest.param(Options(micro_batches=2), marks=pytest.mark.nightly),
        pytest.param(Options(replicas=2, zero_stage=3), marks=pytest.mark.nightly),
    ],
    ids=["pipeline", "micro-batches", "zero-3"],
)
def test_a_bundle_turns_weights_as_the_model_does(options: Options, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    made = bb.split(file, cluster(), tmp_path / "bundle", options)
    devices = [(made.bundle / f"device_{name}.py").read_text() for name in ("d0", "d1")]
    turned = "        self.to(memory_format=torch.channels_last)\n"
    assert all(turned in device for device in devices)
    found = {check.name: check.word for check in verify(made.bundle, steps=3).checks}
    whole = {name for name in found if name.startswith("whole batch")}
    assert {found[name] for name in found.keys() - whole} == {"equal"}
    assert all(found[name] in ("equal", "to rounding") for name in whole)
