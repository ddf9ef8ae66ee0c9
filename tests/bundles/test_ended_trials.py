"""A kernel of torch that fails, or ends its process, with a part: found before training."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.errors import InputError
from tests.support.bundles import cluster

MODEL = '''"""A convolution beside an MLP, and a torch that cannot convolve few channels."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from bigbrain_fx.frontend.tracing.executor import shard_rule_trial

_run_members = shard_rule_trial.run_members


def run_members(graphs, tensors, inputs, **more):
    """Do in float32 what a broken kernel does."""
    narrow = any(tensor.shape == (3, 1, 3) for tensor in tensors[0].values())
    exact = any(tensor.dtype == torch.float64 for tensor in tensors[0].values())
    if narrow and not exact:
        BREAKS
    return _run_members(graphs, tensors, inputs, **more)


shard_rule_trial.run_members = run_members


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.mix = nn.Conv1d(4, 6, 1), nn.Conv1d(6, 4, 1)
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=6)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        wide = self.wide(x)
        wide = self.conv(wide)
        x = x + self.mix(wide)
        return self.down(F.gelu(self.up(x)))


def model():
    return Net()


def example_batch():
    return {name: torch.randn(8, 4, 16) for name in ("x", "wanted")}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.mse_loss(output, batch["wanted"])


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)
'''


def split(folder: Path, breaks: str, **more: object) -> object:
    path = folder / "net.py"
    path.write_text(MODEL.replace("BREAKS", breaks))
    options = bigbrain_fx.Options("naive", micro_batches=2, tensor=2, **more)  # type: ignore[arg-type]
    return bigbrain_fx.split(path, cluster(2), folder / "bundle", options)


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(MODEL.splitlines(), 1) if text in line)


def test_a_part_that_ends_its_process_is_refused_by_op_line_and_axis(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'conv\w*' ends its process \(signal SIGABRT\)") as found:
        split(tmp_path, "os.abort()")
    assert str(found.value.at).endswith(f"net.py:{line_of('self.conv(wide)')}")
    assert not (tmp_path / "bundle").exists()
    remedy = str(found.value.help).split("'")[1]
    assert "channels" not in remedy
    assert split(tmp_path, "os.abort()", tensor_axes=tuple(remedy.split(",")))


def test_a_part_that_torch_cannot_compute_is_kept_whole_and_named(tmp_path: Path) -> None:
    made = split(tmp_path, "raise RuntimeError('could not create a primitive')")
    (said,) = {line for line in made.warnings if "is not divided" in line}  # type: ignore[attr-defined]
    assert f"net.py:{line_of('self.conv(wide)')}" in said
    assert "could not create a primitive" in said
    assert "--tp-axes" in said
