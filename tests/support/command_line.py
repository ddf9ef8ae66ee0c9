"""Call the command line in this process, and a small model to call it with."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.cli import main

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def model():
    print("a model file may print")
    return Net()


def example_batch():
    return {"x": torch.ones(8, 8), "y": torch.zeros(8, 8)}


def loss(output, batch):
    return F.mse_loss(output, batch["y"])
"""

# Left alone, the planner keeps so small a model on one device.
CHOICES = ("--partitioner", "naive", "--micro-batches", "4")


@dataclass(frozen=True)
class Called:
    """What a command did: exit code, what it printed where."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Standard output as JSON, an object a line, and strictly JSON."""
        return [json.loads(line, parse_constant=_no_constant) for line in self.out.splitlines()]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def call(*words: str | Path) -> Called:
    """Run a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return Called(code, out.getvalue(), err.getvalue())


def write_model(folder: Path, text: str = MODEL, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def write_cluster(
    folder: Path,
    count: int = 2,
    memory: str = "1GiB",
    hosts: tuple[str, ...] = ("localhost",),
    name: str = "cluster.json",
    speed: int = 10,
) -> Path:
    """Write a cluster of alike CPU devices d0, d1, ..., on the hosts in turn."""
    devices: list[Mapping[str, object]] = [
        {
            "name": f"d{i}",
            "host": hosts[i % len(hosts)],
            "kind": "cpu",
            "memory": memory,
            "flops": f"{speed}GFLOP/s",
            "memory_bandwidth": f"{speed}GB/s",
        }
        for i in range(count)
    ]
    links = {"default": {"bandwidth": "1GB/s", "latency": "50us"}}
    path = folder / name
    path.write_text(json.dumps({"devices": devices, "links": links}))
    return path


def tiny_bundle(base: Path) -> Path:
    """Return the bundle of MODEL on two devices, made once a session; leave it as it is."""
    folder = base / "tiny"
    if not folder.exists():
        folder.mkdir()
        model, cluster = write_model(folder), write_cluster(folder)
        done = call("split", model, "--devices", cluster, "--out", folder / "bundle", *CHOICES)
        assert done.code == 0, done.err
    return folder / "bundle"


def files(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, and every empty folder, to see that nothing changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }
