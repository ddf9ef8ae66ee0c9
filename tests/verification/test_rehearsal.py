"""What `split` writes is trained beside the model file's own loop before it is in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles import rehearsing
from tests.support.bundles import cluster

pytestmark = pytest.mark.usefixtures("rehearsals")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        {forward}
        return self.b(torch.relu(self.a(x)) * {factor}).mean()

RATE = [1.0]

def model():
    {model}
    return Net()

def example_batch():
    return torch.ones(4, 8)

def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        {batches}
        yield torch.randn(4, 8, generator=draw)

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

def lr_scale(step):
    return RATE[0]
"""


def _file(folder: Path, **lines: str) -> Path:
    plain = {"forward": "pass", "factor": "1.0", "model": "pass", "batches": "pass"}
    path = folder / "net.py"
    path.write_text(NET.format(**{**plain, **lines}))
    return path


def _split(path: Path, *, strict: bool = False, rehearse: bool = True) -> bb.Split:
    options = bb.Options("naive", micro_batches=2, strict=strict)
    return bb.split(path, cluster(2), path.parent / "b", options, rehearse=rehearse, force=True)


def test_a_plain_model_is_as_its_loop(tmp_path: Path) -> None:
    made = _split(_file(tmp_path))
    assert made.rehearsed.startswith("3 steps")
    assert not made.plan.graph.is_opaque_step
    assert made.warnings == ()


def test_it_can_be_left_out(tmp_path: Path) -> None:
    assert _split(_file(tmp_path), rehearse=False).rehearsed == ""


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param({"model": "RATE[0] = 0.5"}, id="model() sets the rate"),
        pytest.param({"batches": "RATE[0] *= 2.0"}, id="batches() sets the rate"),
        pytest.param(
            {"forward": "self.calls += 1", "factor": "self.calls"}, id="forward counts its calls"
        ),
    ],
)
def test_what_trains_otherwise_runs_as_it_is_written(tmp_path: Path, lines: dict[str, str]) -> None:
    path = _file(tmp_path, **lines)
    made = _split(path)
    assert made.plan.graph.is_opaque_step
    with pytest.raises(bb.BigBrainError):
        _split(path, strict=True)
    assert bb.read_plan(tmp_path / "b").graph.is_opaque_step  # the former one is still there


def test_what_takes_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing, "LIMIT_S", 0.01)
    made = _split(_file(tmp_path))
    assert made.rehearsed == ""
    assert [note for note in made.warnings if "own loop" in note]
