"""`--assume` and `--opaque` on the command line, and what a bundle says when data contradict it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import edit
from tests.support.command_line import call, write_cluster, write_model

MODEL = """import torch
from torch import nn


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.part = Part()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        h = self.part(self.first(x))
        if x.sum() > 0:
            h = h * 2
        return self.last(h).square().mean()


def model():
    return Net()


def example_batch():
    return {"x": torch.linspace(-1, 3, 32).view(8, 4)}
"""
LINE = next(i for i, line in enumerate(MODEL.splitlines(), 1) if "x.sum() > 0" in line)
ONE = ("--partitioner", "naive", "--micro-batches", "1")


def test_a_branch_is_assumed_checked_and_verified(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    bundle = tmp_path / "bundle"
    where = ("--devices", cluster, "--out", bundle)
    given = ("--assume", f"branch.py:{LINE}=true", "--opaque", "Part")
    made = call("split", model, *where, *ONE, *given)
    assert made.code == 0, made.err
    assert f"warning: assumed True at branch.py:{LINE}: if x.sum() > 0" in made.err
    texts = "".join((bundle / f"device_d{i}.py").read_text() for i in range(2))
    assert f'assume(x.sum() > 0, "branch.py:{LINE}")' in texts
    assert "self.part(" in texts
    assert call("verify", bundle, "--steps", "2").code == 0
    edit(bundle / "training.py", "batches = example_batches", "_same = example_batches")
    with (bundle / "training.py").open("a") as file:
        file.write("\n\ndef contrary(seed):\n    for batch in _same(seed):\n")
        file.write("        yield {name: -tensor for name, tensor in batch.items()}\n")
    edit(bundle / "train.py", "training.batches", "training.contrary")
    failed = call("run", bundle, "--steps", "1")
    assert failed.code == 2
    assert "Traceback" not in failed.err
    assert "`split --opaque CLASS` keeps whole; split again" in failed.err
    assert f"branch.py:{LINE}: this was True for the example batch" in failed.err


@pytest.mark.nightly
def test_an_estimate_needs_the_answer(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    refused = call("estimate", model, "--devices", cluster)
    assert refused.code == 4
    assert "error[BX0101a]: " in refused.err
    assert f"--assume branch.py:{LINE}=false" in refused.err
    told = call("estimate", model, "--devices", cluster, "--assume", f"branch.py:{LINE}=true")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--assume", "branch.py=true", "FILE:LINE=true"),
        ("--opaque", "Prt", "did you mean Part"),
    ],
)
def test_words_that_mean_nothing(tmp_path: Path, option: str, value: str, says: str) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    done = call("estimate", model, "--devices", cluster, option, value)
    assert done.code == 2
    assert says in done.err
