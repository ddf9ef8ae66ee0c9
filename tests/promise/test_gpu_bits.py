"""One GPU: bundles train on it with the bits of untouched PyTorch on that GPU, processes share it.

`BIGBRAIN_GPU_BITS=cpu` runs the same on CPU devices, where no GPU is.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.bundles.launch import Backend, RunOptions, run
from bigbrain_fx.runtime.limits import SHARE_GPUS
from tests.support.command_line import call

KIND = os.environ.get("BIGBRAIN_GPU_BITS", "cuda")
STEPS, MICRO = 5, 4
GPT = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.n1, self.qkv, self.o = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(97, 64), nn.Linear(64, 97)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.head(self.blocks(self.words(x)))


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten())


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(97, (16, 33), generator=dice)
        yield {"x": rows[:, :-1].contiguous(), "y": rows[:, 1:].contiguous()}


def example_batch():
    return next(batches(0))


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


clip_norm = 1.0
"""
CNN = """
import torch
import torch.nn.functional as F
from torch import nn

torch.backends.cudnn.deterministic = True  # else cuDNN adds in any order


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.past = nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x):
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.past(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(64, 10)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.first(x))).mean((2, 3)))


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        images = torch.randn(16, 3, 16, 16, generator=dice)
        yield {"x": images, "y": torch.randint(10, (16,), generator=dice)}


def example_batch():
    return next(batches(0))


def optimizer(named_params):
    return torch.optim.SGD([p for _, p in named_params], lr=0.05, momentum=0.9)
"""
FILES = {"gpt": GPT, "cnn": CNN}
REPLICAS = ("--replicas", "2", "--all-reduce-order", "micro")
CASES: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "one": ("gpt", 1, ()),
    "one-cnn": ("cnn", 1, ()),
    "two": ("gpt", 2, ()),
    "two-cnn": ("cnn", 2, ()),
    **{name: ("gpt", 2, ("--schedule", name)) for name in ("zb-h1", "interleaved", "zb-v")},
    "recompute": ("gpt", 2, ("--activation-checkpointing", "all")),
    "recompute-ops": ("gpt", 2, ("--activation-checkpointing", "ops")),
    **{f"zero{stage}": ("gpt", 2, (*REPLICAS, "--zero", stage)) for stage in "0123"},
    "host-memory": ("gpt", 2, ("--offload", "activations,state")),
    "disk": ("gpt", 1, ("--offload", "activations,state")),
}
"""A model, devices and what is asked of them, by name: each has the bits of one process."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def cluster(folder: Path, name: str, devices: int, words: Sequence[str]) -> Path:
    """Write a cluster file: devices that are alike, with stores where they are asked for."""
    shared = {"host": "here", "kind": KIND, "memory": "8GiB", "memory_bandwidth": "1TB/s"}
    described: dict[str, Any] = {
        "devices": [{"name": f"d{i}", "flops": "10TFLOP/s", **shared} for i in range(devices)],
        "links": {"default": {"latency": "50us", "bandwidth": "5GB/s"}},
    }
    if "--offload" in words:
        where = {"folder": str(folder)} if name == "disk" or KIND == "cpu" else {}
        rest = {"capacity": "4GiB", "bandwidth": "20GB/s", **where}
        stores = [{"name": f"s{i}", "device": f"d{i}", **rest} for i in range(devices)]
        described["stores"] = stores
    path = folder / "cluster.json"
    path.write_text(json.dumps(described))
    return path


def untouched(path: Path) -> dict[str, Tensor]:
    """Train as the model file's user would, with nothing of ours."""
    spec = importlib.util.spec_from_file_location("untouched", path)
    assert spec is not None
    assert spec.loader is not None
    file = cast("Any", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(file)
    where, data = torch.device(KIND), file.batches(0)
    net = file.model().to(where).train()
    optimizer = file.optimizer(net.named_parameters())
    for _ in range(STEPS):
        batch = {name: value.to(where).chunk(MICRO) for name, value in next(data).items()}
        for micro in range(MICRO):
            part = {name: values[micro] for name, values in batch.items()}
            (file.loss(net(part["x"]), part) / MICRO).backward()
        if hasattr(file, "clip_norm"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), file.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_untouched_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_GPUS, "1")
    file, devices, words = CASES[name]
    model, out, saved = tmp_path / f"{file}.py", tmp_path / "bundle", tmp_path / "saved"
    model.write_text(FILES[file])
    described = cluster(tmp_path, name, devices, words)
    plain = ("--partitioner", "naive", "--micro-batches", str(MICRO))
    done = call("split", model, "--devices", described, "--out", out, *plain, *words)
    assert done.code == 0, done.err
    backend: Backend | None = "gloo" if devices > 1 else None
    run(out, RunOptions(steps=STEPS, save=saved, deadline_s=120.0, backend=backend))
    found: dict[str, Tensor] = {}
    for each in saved.glob("*.safetensors"):
        found.update(load_file(each))
    wanted = untouched(model)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
