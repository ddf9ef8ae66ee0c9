"""Teacher forcing by Python's random: its lines are opaque, its draws keyed as those of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bigbrain_fx as bb
from bigbrain_fx.bundles import RunOptions, run, verify
from bigbrain_fx.plan import Options
from tests.support.bundles import cluster, edit_last

MODEL = '''"""A decoder that is given the target, or what it has answered itself."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 20)

    def forward(self, source, target):
        _, state = self.encoder(self.embed(source))
        hidden, token, outputs = state[0], target[:, 0], []
        for t in range(1, target.shape[1]):
            hidden = self.cell(self.embed(token), hidden)
            output = self.head(hidden) + float(np.random.uniform(-0.1, 0.1))
            outputs.append(output)
            token = target[:, t] if random.random() < 0.5 else output.argmax(1)
        return torch.stack(outputs, 1)


def model():
    return Seq2Seq()


def batches(seed):
    while True:
        yield example_batch()


def example_batch():
    return {"source": torch.randint(20, (4, 5)), "target": torch.randint(20, (4, 6))}


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["target"][:, 1:].flatten())
'''
KILL = """import os


def kill_once(device, step):
    mark = Path(__file__).with_name("killed")
    if step == 2 and device.name == "d1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


HOOKS.on_step_end.append(kill_once)

if __name__"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("draws") / "model.py"
    file.write_text(MODEL)
    with pytest.warns(bb.SplitWarning, match="draws random numbers with Python or NumPy"):
        made = bb.split(file, cluster(), file.parent / "bundle", Options("naive"))
    drawn = [op for op in made.plan.graph.ops if op.target.startswith("leaf.forward_")]
    assert [op.random for op in drawn] == [True]
    assert len(made.plan.stages.devices) == 2
    return made.bundle


def test_a_bundle_draws_as_the_loop_beside_it(bundle: Path) -> None:
    checks = verify(bundle, steps=3).checks
    assert {check.word for check in checks} <= {"equal", "to rounding", "equal to rounding"}


@pytest.mark.nightly
def test_a_replaced_device_draws_the_same(bundle: Path, tmp_path: Path) -> None:
    def saved(name: str) -> dict[str, Tensor]:
        options = RunOptions(steps=4, save=tmp_path / name, threads=1, spares=1)
        assert run(bundle, options).restarts == (name == "disturbed")
        files = sorted((tmp_path / name).glob("*.safetensors"))
        return {n: t for file in files for n, t in load_file(file).items()}

    undisturbed = saved("undisturbed")
    edit_last(bundle / "train.py", "if __name__", KILL)
    disturbed = saved("disturbed")
    assert undisturbed.keys() == disturbed.keys()
    assert all(torch.equal(t, disturbed[n]) for n, t in undisturbed.items())
