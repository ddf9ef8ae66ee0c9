"""A bare bundle trains as a plain PyTorch loop does, where bigbrain-fx cannot be imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx import Options, RunOptions, run, split
from bigbrain_fx.bundles import verify
from bigbrain_fx.bundles.launch import free_port
from bigbrain_fx.errors import InputError
from tests.promise.conftest import Outside
from tests.support import warm
from tests.support.bundles import cluster

STEPS = 4
MODEL = '''"""A net with a skip over the middle, and a head that is the embedding; clipped."""
import torch
import torch.nn.functional as F
from torch import nn

clip_norm = 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.second(torch.relu(self.norm(self.first(x))))
        return self.head(x + y)


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(11, (8, 6), generator=generator)
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def example_batch():
    return next(batches(0))


def optimizer(named):
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
'''


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Train in a loop of plain PyTorch; return losses and weights."""
    net: dict[str, Any] = {}
    exec(MODEL, net)
    model, found = net["model"](), []
    optimizer = net["optimizer"](model.named_parameters())
    for _, batch in zip(range(STEPS), net["batches"](0), strict=False):
        loss = net["loss"](model(batch["tokens"]), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), net["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found, model.state_dict()


def written(folder: Path, name: str, micro_batches: int, devices: int) -> Path:
    (folder / "net.py").write_text(MODEL)
    choices = Options("naive", schedule="1f1b", micro_batches=micro_batches)
    bare, lean = name == "bare", name == "lean"
    out = folder / name
    return split(
        folder / "net.py", cluster(devices), out, choices, bare=bare, lean=lean, force=True
    ).bundle


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two stages; a step has one micro-batch, the whole batch."""
    return written(tmp_path_factory.mktemp("whole"), "bare", 1, 2)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of two stages with four micro-batches."""
    return written(tmp_path_factory.mktemp("parted"), "bare", 4, 2)


def trained(bundle: Path, outside: Outside, world: int, out: Path) -> list[float]:
    """Train by RANK and WORLD_SIZE; return the losses."""
    place = {"WORLD_SIZE": str(world), "MASTER_PORT": str(free_port())}
    words = ["train.py", "--json", "--steps", str(STEPS), "--deadline", "60", "--save", str(out)]
    processes: list[subprocess.Popen[str]] = [
        outside.start(bundle, words, {**place, "RANK": str(rank)}) for rank in range(world)
    ]
    return losses("".join(outside.results(*processes)))


def losses(text: str) -> list[float]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def saved(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.iterdir()) for name, t in load_file(file).items()}


def test_a_whole_batch_trains_bitwise_as_a_plain_loop(
    whole: Path, outside: Outside, tmp_path: Path
) -> None:
    told, want = plain()
    assert trained(whole, outside, 2, tmp_path / "saved") == told
    have = saved(tmp_path / "saved")
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())


@pytest.mark.nightly
def test_micro_batches_train_bitwise_as_in_other_tiers(
    parted: Path, outside: Outside, tmp_path: Path
) -> None:
    found = trained(parted, outside, 2, tmp_path / "bare")
    written(parted.parent, "lean", 4, 2)
    words = ["train.py", "--in-process", "--json", "--steps", str(STEPS)]
    lean = outside.python(parted.parent / "lean", *words, "--save", str(tmp_path / "lean"))
    assert found == losses(lean)
    bare, other = saved(tmp_path / "bare"), saved(tmp_path / "lean")
    assert bare.keys() == other.keys()
    assert all(torch.equal(bare[name], other[name]) for name in bare)


@pytest.mark.nightly
def test_run_starts_it(parted: Path, tmp_path: Path) -> None:
    done = run(parted, RunOptions(2, deadline_s=60.0, logs=tmp_path / "logs"))
    assert [line.step for line in done.steps] == [0, 1]


def test_verify_names_the_tier_that_it_needs(whole: Path) -> None:
    with pytest.raises(InputError) as caught:
        verify(whole)
    assert caught.value.code == "BX3166"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gloo", "recipe", "pipeline_device"])
def test_a_file_that_is_gone_is_named(
    whole: Path, outside: Outside, tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "bundle")
    (copy / "runtime" / f"{name}.py").unlink()
    process = outside.start(copy, ["train.py"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error[BX3690]" in err
    assert f"runtime.{name}" in err
    assert "Traceback" not in err


def test_another_number_of_processes_is_refused(whole: Path, outside: Outside) -> None:
    place = {**outside.environment, "RANK": "0", "WORLD_SIZE": "3"}
    words = [sys.executable, "train.py"]
    done = warm.run(words, cwd=whole, env=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error[BX5205]" in done.stderr
