"""Weights lie on devices as the model lays them; a kernel that fails with a part is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx
import bigbrain_fx as bb
from bigbrain_fx.bundles import verify
from bigbrain_fx.errors import InputError
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


# --------------------------------------------------------------------------- kernels that fail


FAILING = '''"""A convolution beside an MLP, and a torch that cannot convolve few channels."""

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
    path.write_text(FAILING.replace("BREAKS", breaks))
    options = bigbrain_fx.Options("naive", micro_batches=2, tensor=2, **more)  # type: ignore[arg-type]
    return bigbrain_fx.split(path, cluster(2), folder / "bundle", options)


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(FAILING.splitlines(), 1) if text in line)


@pytest.mark.nightly
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
