"""Lines of a forward that a bundle runs as they stand: they are given what they read."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx as bb
from tests.support.bundles import cluster

MODEL = '''"""A count of the data masks positions on the device of the input, as XLM's does."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        device = x.device
        h = self.a(x)
        count = int((h > 0).sum()) % 8
        mask = torch.arange(8, device=device) < count
        return self.b(h * mask).mean()


def model():
    torch.manual_seed(0)
    return Net()


def example_batch():
    return {"x": torch.rand(8, 8)}
'''


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_lines_may_read_a_device_of_lines_before_them(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    made = bb.split(tmp_path / "model.py", cluster(2), tmp_path / "b", bb.Options("naive"))
    assert ".device, " in (tmp_path / "b" / "device_d0.py").read_text()
    assert made.rehearsed
