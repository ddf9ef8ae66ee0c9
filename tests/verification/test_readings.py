"""Batches that go on from one reading to the next are refused by `verify`, never compared."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.errors import InputError
from tests.support import samples

FILE = """
import torch
from torch import nn

ROWS = iter(torch.randn(64, 4, 6, generator=torch.Generator().manual_seed(0)))


def model():
    return nn.Linear(6, 1)


def example_batch():
    return {"input": torch.ones(4, 6)}


def loss(output, batch):
    return output.square().mean()


def batches(seed):
    return ({"input": x} for x in ROWS)
"""


@pytest.mark.parametrize("mode", [pytest.param("train", marks=pytest.mark.nightly), "eval"])
def test_an_iterator_outside_batches_is_refused(
    mode: Literal["train", "eval"], tmp_path: Path
) -> None:
    """One device alone: nobody else says the digest of its batch."""
    path = tmp_path / "rows.py"
    path.write_text(FILE)
    made = bb.split(path, samples.cluster(1), tmp_path / "out", bb.Options("naive", mode=mode))
    with pytest.raises(InputError, match=r"batch 0 .entry input. is another one") as error:
        verify(made.bundle, steps=1)
    assert "make in batches() what it changes" in str(error.value.help)
