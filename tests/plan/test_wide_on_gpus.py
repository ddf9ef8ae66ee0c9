"""A cut through what autocast keeps in float32 on a GPU alone is refused, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bigbrain_fx.plan import wide_on_gpus
from tests.support.command_line import Called, call

FILE = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.a = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
{lines}
        return self.head(x)


def model():
    torch.manual_seed(0)
    return Net()


def loss(output, batch):
    return F.mse_loss(output.float(), batch["y"])


def example_batch():
    torch.manual_seed(1)
    return {{"x": torch.randn(8, 8), "y": torch.randn(8, 4)}}


{more}
"""
AUTOCAST = 'autocast = "bfloat16"'
BLOCKS = "for a in self.a:\n    x = x + F.gelu(a(x))"
WHOLE = "x = self.norm(self.stem(x))\n" + BLOCKS
LINE = FILE.partition("{lines}")[0].count("\n") + 1


def split(folder: Path, lines: str, more: str = AUTOCAST, kinds: str = "gg") -> Called:
    indented = "\n".join(f"        {line}" for line in lines.splitlines())
    (folder / "net.py").write_text(FILE.format(lines=indented, more=more))
    rates = {"memory": "1GiB", "flops": "1TFLOP/s", "memory_bandwidth": "1TB/s", "host": "here"}
    devices = [
        {"name": f"d{i}", "kind": {"g": "cuda", "c": "cpu"}[kind], **rates}
        for i, kind in enumerate(kinds)
    ]
    links = {"default": {"bandwidth": "1GB/s", "latency": "50us"}}
    (folder / "cluster.json").write_text(json.dumps({"devices": devices, "links": links}))
    how = ("--partitioner", "naive", "--micro-batches", "2", "--out", folder / "bundle")
    return call("split", folder / "net.py", "--devices", folder / "cluster.json", *how)


def test_what_comes_of_a_layer_norm_is_not_sent_by_a_gpu(tmp_path: Path) -> None:
    done = split(tmp_path, WHOLE)
    assert done.code == 2
    assert "a GPU keeps layer_norm in float32" in done.err
    assert f"at: net.py:{LINE}\n" in done.err
    assert not (tmp_path / "bundle").exists()


FINE = {
    "as is told": ("x = self.norm(self.stem(x)).float()\n" + BLOCKS, AUTOCAST, "gg"),
    "CPUs": (WHOLE, AUTOCAST, "cc"),
    "a CPU sends it": (WHOLE, AUTOCAST, "cg"),
    "without autocast": (WHOLE, "", "gg"),
    "float32 before": ("x = self.norm(x + self.stem(x))\n" + BLOCKS, AUTOCAST, "gg"),
    "multiplied since": (
        "x = self.norm(self.stem(x))\nfor a in self.a:\n    x = a(x)",
        AUTOCAST,
        "gg",
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_what_has_one_type_everywhere_is_planned(name: str, tmp_path: Path) -> None:
    lines, more, kinds = FINE[name]
    done = split(tmp_path, lines, more, kinds)
    assert done.code == 0, done.err


def test_a_region_of_autocast_counts_and_what_leaves_it(tmp_path: Path) -> None:
    region = "with torch.autocast(x.device.type, dtype=torch.bfloat16):\n    "
    wide = f"{region}x = self.norm(self.stem(x))\n{BLOCKS}"
    assert split(tmp_path, wide).code == 2
    off = wide.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
    assert split(tmp_path, off).code == 0


def test_names_are_of_torch() -> None:
    named = wide_on_gpus._FLOAT32 | wide_on_gpus._SIXTEEN
    assert [name for name in named if not hasattr(torch.ops.aten, name)] == []
    assert not wide_on_gpus._FLOAT32 & wide_on_gpus._SIXTEEN
