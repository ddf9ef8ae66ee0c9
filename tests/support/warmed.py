"""Capture one small model here, so that forks of this process find torch in use already.

The first capture of a process fills what torch makes as it is first needed: modules, tables of its
dispatchers, results of sympy. The model has the layers that most tests have.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import torch

from bigbrain_fx.frontend.capture_service import CaptureService

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 9)

    def forward(self, letters):
        x = self.embed(letters)
        rows, length, width = x.shape
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        heads = x.view(rows, length, 2, width // 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(rows, length, width)
        return self.head(torch.relu(torch.tanh(x)))


def model():
    return Net()


def loss(output, batch):
    picked = F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())
    return picked + F.mse_loss(output, torch.zeros_like(output))


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(9, (8, 6), generator=dice)
        yield {"letters": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def example_batch():
    return next(batches(0))


def optimizer(named):
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
"""
WANTED = {
    **{"meta": False, "blank": False, "training": True, "seed": 0, "micro_batch": 4},
    **{"assume": {}, "leaves": [], "cache": 0, "quantize": None, "parts": 2, "strict": False},
    **{"apart": [], "loss_apart": False, "known": "", "environment": {}},
}


def capture(folder: Path) -> None:
    """Capture the model, and measure what a split measures."""
    file = folder / "warmed_model.py"
    file.write_text(MODEL)
    wanted = {**WANTED, "location": str(file), "graph": str(folder / "graph.json")}
    service = CaptureService(wanted)
    service.report()
    service.micro_batch_effect(2)


def main() -> None:
    """Capture it, and leave nothing of it in what a program can see of its process."""
    paths, finders, dice = list(sys.path), list(sys.meta_path), torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):
        capture(Path(folder))  # its faults are for tests to show
    sys.path[:], sys.meta_path[:] = paths, finders
    sys.modules.pop("warmed_model", None)
    torch.set_rng_state(dice)


main()
