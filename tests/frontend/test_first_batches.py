"""The first batches of a model file, read as its bundle would read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import BatchReading, capture_file

HEAD = """
import torch
from torch import nn

def model():
    return nn.Linear(6, 4)

def example_batch():
    return (torch.randn(8, 6), torch.randn(8, 4))

def loss(output, batch):
    return (output - batch[1]).square().mean()

def batches(seed):
"""
READING = BatchReading(
    {"input": (0,), "y": (1,)},
    (),
    2,
    {"input": ("float32", (8, 6)), "y": ("float32", (8, 4))},
)


def read(folder: Path, lines: str) -> None:
    """Read the first batches that a file yields."""
    path = folder / "model.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in lines.splitlines()))
    with capture_file(path) as session:
        session.require_first_batches(READING)


@pytest.mark.parametrize(
    "lines",
    [
        "while True: yield example_batch()",
        "yield example_batch()",  # data that end are no fault: a run may be as short
        "for n in (8, 8, 8, 5): yield torch.randn(n, 6), torch.randn(n, 5)[:, :4 + n % 2]",
    ],
    ids=["plain", "ends", "later"],
)
def test_batches_that_fit_the_trace_pass(tmp_path: Path, lines: str) -> None:
    read(tmp_path, lines)


def test_one_that_does_not_fit_is_refused_before_a_run(tmp_path: Path) -> None:
    lines = "yield example_batch()\nyield torch.randn(8, 5), torch.randn(8, 4)"
    with pytest.raises(CaptureError, match="batch 2 ") as caught:
        read(tmp_path, lines)
    assert caught.value.code == "BX0135"
    assert caught.value.of_code
    assert caught.value.at == "model.py:14"
