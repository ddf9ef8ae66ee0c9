"""Which lines of a model file ask for the device, and who is told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.frontend import capture, told_of_gpus
from bigbrain_fx.frontend.device_dependence import device_lines
from tests.support.command_line import call, write_cluster

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

HERE = "cuda" if {at_import} else "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
{lines}
        return self.b(x.float())


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def example_batch():
    torch.manual_seed(1)
    return {{"x": torch.randn(4, 8), "y": torch.randn(4, 8)}}
"""
FIRST = FILE.partition("{lines}")[0].count("\n") + 1
OTHERWISE = {
    "is_cuda": "if x.is_cuda:\n    x = x * 2",
    "is_cpu": "x = x if x.is_cpu else x * 2",
    "the kind": "if x.device.type == 'cuda':\n    x = x * 2",
    "equal": "if x.device != torch.device('cpu'):\n    x = x * 2",
    "text": "x = x * 2 if str(x.device).startswith('cuda') else x",
    "available": "if torch.cuda.is_available():\n    x = x.half()",
    "autocast": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    x = self.b(x)",
    "autocast, by name": "with torch.autocast(device_type='cuda'):\n    x = self.b(x)",
    "its old name": "with torch.cuda.amp.autocast():\n    x = self.b(x)",
    "of the CPU": "with torch.autocast('cpu', dtype=torch.bfloat16):\n    x = self.b(x)",
    "asks whether it casts": "x = x * 2 if torch.is_autocast_enabled() else x",
}
LIKE_HERE = {
    "its own kind": "with torch.autocast(x.device.type, dtype=torch.bfloat16):\n    x = self.b(x)",
    "places": "x = x + torch.ones(8, device=x.device).to(x.device)",
    "waits": "x.sum(); torch.cuda.synchronize",
    "in a comment": "x = x * 2  # on cuda, x.is_cuda",
}


def written(folder: Path, lines: str, at_import: str = "False") -> Path:
    path = folder / "asks.py"
    indented = "\n".join(f"        {line}" for line in lines.splitlines())
    path.write_text(FILE.format(lines=indented, at_import=at_import))
    return path


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # a module of its own
    spec = importlib.util.spec_from_file_location("asks", path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "asks", file)
    spec.loader.exec_module(file)
    return file


def lines_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    file = loaded(path, monkeypatch)
    return device_lines(file.model(), file.loss)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_line_that_asks_for_the_device_is_told_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lines_of(written(tmp_path, OTHERWISE[name]), monkeypatch)
    assert found[0] == f"asks.py:{FIRST}"
    assert told_of_gpus(found, []) == ()
    (said,) = told_of_gpus(found, ["d1", "d3"])
    assert f"(asks.py:{FIRST}" in said
    assert "d1, d3 compute what these lines decide here" in said


@pytest.mark.parametrize("name", LIKE_HERE)
def test_lines_that_read_no_device_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lines_of(written(tmp_path, LIKE_HERE[name]), monkeypatch)
    assert found == ()
    assert told_of_gpus(found, ["d0"]) == ()


def test_decisions_at_import_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = loaded(written(tmp_path, "pass", "torch.cuda.is_available()"), monkeypatch)
    found = capture(file.model(), file.example_batch(), file.loss).device_lines
    assert found == ("asks.py:6",)


@pytest.mark.gate("cuda")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_plan_of_gpus_is_warned_and_one_of_cpus_is_not(tmp_path: Path, kind: str) -> None:
    model, cluster = written(tmp_path, OTHERWISE["autocast"]), tmp_path / "cluster.json"
    rates = '"memory": "1GiB", "flops": "1TFLOP/s", "memory_bandwidth": "1TB/s"'
    cluster.write_text(f'{{"devices": [{{"name": "d0", "kind": "{kind}", {rates}}}]}}')
    done = call("split", model, "--devices", cluster, "--out", tmp_path / "bundle")
    assert done.code == 0, done.err
    assert (f"asks what device it is on (asks.py:{FIRST})" in done.err) == (kind == "cuda")


NO_GPU = {
    "model": ("return Net()", "return Net().cuda()"),
    "loss": ('batch["y"])', 'batch["y"].to("cuda"))'),
}


@pytest.mark.gate("model")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.parametrize("name", NO_GPU)
def test_lines_that_want_a_gpu_are_to_be_left_out(name: str, tmp_path: Path) -> None:
    before, after = NO_GPU[name]
    path = written(tmp_path, "pass")
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    done = call("split", path, "--devices", write_cluster(tmp_path), "--out", tmp_path / "bundle")
    assert done.code == 2
    assert 'leave .cuda() and .to("cuda") out of the model file' in done.err
