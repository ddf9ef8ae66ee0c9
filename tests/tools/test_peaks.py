"""Peaks of memory: MemTracker's forecast of a plain loop is what that loop then holds."""

from __future__ import annotations

from pathlib import Path

from bigbrain_fx.frontend import load_model_file
from tools.peaks import Peaks, loop_bytes, tracker_bytes

_ONE_MATRIX = """
import torch
from torch import nn

def model(): return nn.Linear(64, 64, bias=False)
def example_batch(): return {"input": torch.zeros(8, 64)}
def loss(output, batch): return output.mean()
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
"""


def test_a_loop_on_fake_tensors_peaks_where_the_real_one_does(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_ONE_MATRIX)
    file = load_model_file(tmp_path / "model.py")
    weight = 64 * 64 * 4
    found = loop_bytes(file)
    assert tracker_bytes(file) == found
    assert 3 * weight < found < 5 * weight  # weight, gradient, momentum, and what one op makes


def test_each_forecast_is_held_against_what_it_is_of() -> None:
    assert str(Peaks("gpt", 2**20, 3 * 2**20, 2 * 2**20, 2**20, 4 * 2**20)) == (
        "| gpt | 2.00 | -50.0 % | +50.0 % | 4.00 | -75.0 % |"
    )
