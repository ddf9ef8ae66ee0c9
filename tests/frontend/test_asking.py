"""What forward and loss ask of their device, and whether they compute otherwise on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Elsewhere, capture, told_of_gpus
from bigbrain_fx.frontend.tracing.asking import asked_of_device
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Step, route
from bigbrain_fx.frontend.translation.batch import take_apart
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
    "asks whether it casts": "with torch.autocast(x.device.type, torch.bfloat16): "
    "x = x * 2 if torch.is_autocast_enabled() else x",
    "then waits": "if x.is_cuda: x = x * 2; torch.cuda.synchronize()",
    "then runs what a CPU cannot": "if x.is_cuda: x = x * 2\n"
    "x = torch.ops.of_a_gpu.fused(x) if x.is_cuda else x",
}
DECORATED = {
    "cpu": "@torch.autocast('cpu', dtype=torch.bfloat16)",
    "cuda": "@torch.autocast('cuda', dtype=torch.bfloat16)",
    "its old name": "@torch.cuda.amp.autocast()",
}
LIKE_HERE = {
    "its own kind": "with torch.autocast(x.device.type, dtype=torch.bfloat16):\n    x = self.b(x)",
    "places": "x = x + torch.ones(8, device=x.device).to(x.device)",
    "no effect": "kind = 'gpu' if x.is_cuda else 'cpu'",
    "alike": "assert x.device == self.a.weight.device and x.device.index in (0, None)",
    "switched off": "with torch.autocast('cuda', enabled=False):\n    x = self.b(x)",
    "of the CPU, off": "with torch.autocast('cpu', enabled=False):\n    x = self.b(x)",
    "of both": "with torch.autocast('cuda', torch.bfloat16), torch.autocast('cpu', torch.bfloat16):"
    "\n    x = self.b(x)",
    "of both, off within": "with torch.autocast(x.device.type, torch.bfloat16):\n    "
    "x = self.b(x)\nwith torch.autocast('cpu', enabled=False):\n    x = self.b(x.float())",
    "type asked": "with torch.autocast(x.device.type, torch.bfloat16):\n    "
    "x = self.b(x).to(torch.get_autocast_dtype(x.device.type))",
    "waits": "if x.is_cuda: torch.cuda.synchronize()",
    "in a comment": "x = x * 2  # on cuda, too",
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


def asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere | None:
    file = loaded(path, monkeypatch)
    model, example = file.model(), file.example_batch()
    batch = take_apart(example)
    step = Step(model, file.loss, batch, route(model, example, has_loss=True))
    return asked_of_device(Plain(step, model, None), [*batch.sized(4).values()])


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_a_gpu_decides_is_found_with_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(written(tmp_path, OTHERWISE[name]), monkeypatch)
    assert found == Elsewhere((f"asks.py:{FIRST}",), differs=True)
    assert told_of_gpus(found, []) == ()
    with pytest.raises(InputError, match="d1, d3 would compute the CPU's") as caught:
        told_of_gpus(found, ["d1", "d3"])
    assert caught.value.at == f"asks.py:{FIRST}"


@pytest.mark.filterwarnings("ignore")  # torch's: no GPU is here, the name is an old one
@pytest.mark.parametrize("name", DECORATED)
def test_a_decorator_of_forward_casts_as_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "pass")
    head, body = "    def forward(self, x):", DECORATED[name]
    path.write_text(path.read_text().replace(head, f"    {body}\n{head}"))
    found = asked(path, monkeypatch)
    assert found is not None
    assert found.differs
    off = body.replace("autocast(", "autocast(enabled=False, ").replace(", 'c", ", device_type='c")
    path.write_text(path.read_text().replace(body, off))
    found = asked(path, monkeypatch)
    assert found is None or not found.differs


@pytest.mark.parametrize("name", LIKE_HERE)
def test_what_computes_the_same_is_let_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(written(tmp_path, LIKE_HERE[name]), monkeypatch)
    assert found is None or not found.differs
    assert told_of_gpus(found, ["d0"]) == ()


def test_of_several_lines_those_are_told_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"{LIKE_HERE['its own kind']}\n{OTHERWISE['is_cuda']}"
    found = asked(written(tmp_path, lines), monkeypatch)
    assert found == Elsewhere((f"asks.py:{FIRST + 2}",), differs=True)


def test_what_only_a_gpu_can_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "if x.is_cuda:\n    x = torch.ops.of_a_gpu.fused(x)"
    found = asked(written(tmp_path, kernel), monkeypatch)
    assert found == Elsewhere((f"asks.py:{FIRST}",), differs=None)
    (said,) = told_of_gpus(found, ["d0"])
    assert "could not be tried here" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_what_was_decided_at_import_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = loaded(written(tmp_path, "pass", "torch.cuda.is_available()"), monkeypatch)
    found = capture(file.model(), file.example_batch(), file.loss).elsewhere
    assert found == Elsewhere(at_import=("asks.py:6",))
    (said,) = told_of_gpus(found, ["d0"])
    assert said.startswith("asks.py:6 asks whether there is a GPU")


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(written(tmp_path, OTHERWISE["its old name"]), monkeypatch)
    assert "device" not in vars(torch.Tensor)
    assert "is_cuda" not in vars(torch.Tensor)
    for own in (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__):
        assert own.__module__ == "torch.amp.autocast_mode"
        assert own.__qualname__.startswith("autocast.__")
    assert type(torch.is_autocast_enabled).__name__ == "builtin_function_or_method"
    assert torch.zeros(1).device == torch.device("cpu")


@pytest.mark.gate("cuda")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_plan_of_gpus_is_refused_and_one_of_cpus_is_not(tmp_path: Path, kind: str) -> None:
    model, cluster = written(tmp_path, OTHERWISE["autocast"]), tmp_path / "cluster.json"
    rates = '"memory": "1GiB", "flops": "1TFLOP/s", "memory_bandwidth": "1TB/s"'
    cluster.write_text(f'{{"devices": [{{"name": "d0", "kind": "{kind}", {rates}}}]}}')
    done = call("split", model, "--devices", cluster, "--out", tmp_path / "bundle")
    assert done.code == (0 if kind == "cpu" else 2), done.err
    assert ("torch.autocast(x.device.type" in done.err) == (kind == "cuda")
    assert (tmp_path / "bundle").exists() == (kind == "cpu")


NO_GPU = {
    "model": ("return Net()", "return Net().cuda()"),
    "loss": ('batch["y"])', 'batch["y"].to("cuda"))'),
}


@pytest.mark.gate("model")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.parametrize("name", NO_GPU)
def test_what_wants_a_gpu_here_is_told_to_leave_that_out(name: str, tmp_path: Path) -> None:
    before, after = NO_GPU[name]
    path = written(tmp_path, "pass")
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    done = call("split", path, "--devices", write_cluster(tmp_path), "--out", tmp_path / "bundle")
    assert done.code == 2
    assert 'leave .cuda() and .to("cuda") out of the model file' in done.err
