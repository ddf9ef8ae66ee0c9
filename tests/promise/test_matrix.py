"""Numbers do not depend on the placement: every model, partitioner, device count and schedule.

The whole table is here, model by model; `python -m tools.conformance matrix` prints it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.verification.trace import Trace
from tests.support import warm
from tools.conformance import matrix
from tools.conformance.matrix import MODELS, cells, other_bytes, over_gloo, parse_cell

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0
STEPS = 3
PER_MODEL = 2 * 3 * 4 + 3  # two chains × 2, 3, 4 devices × four schedules, and scattered by list
OVER_GLOO = (
    "gpt/analytical/2/1f1b/gloo",
    "gpt/scattered/3/list/gloo",
    "llama/naive/2/gpipe/gloo",
    "resnet/analytical/3/1f1b/gloo",
    "unet/scattered/2/list/gloo",
    "encdec/naive/2/1f1b/gloo",
    "moe/analytical/2/gpipe/gloo",
    "digits/naive/4/1f1b/gloo",
)
RECOMPUTING = ("llama/analytical/3/1f1b", "encdec/naive/2/gpipe", "resnet/analytical/2/1f1b/gloo")
OFFLOADING = ("gpt/analytical/2/zb-h1", "gpt/naive/2/1f1b/r2z1micro", "moe/analytical/2/1f1b/gloo")


def rows(*words: str) -> list[dict[str, Any]]:
    """Run the tool: all devices of a cell live in its process."""
    done = warm.run(
        [
            sys.executable,
            "-P",
            "-m",
            "tools.conformance.matrix",
            "--json",
            "--steps",
            str(STEPS),
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=warm.DEVNULL,
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode in (0, 5), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_of_a_model_is_equal(model: str) -> None:
    found = rows("--models", model)
    assert [row for row in found if row["fault"]] == []
    assert len(found) == PER_MODEL
    scattered = [row for row in found if row["cell"]["partitioner"] == "scattered"]
    assert all(row["stages"] > row["cell"]["devices"] for row in scattered)


@pytest.mark.gate("gpt/analytical/2/1f1b/gloo")
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("cell", OVER_GLOO)
def test_real_processes_are_equal_too(cell: str) -> None:
    (found,) = map(asdict, matrix.rows([parse_cell(cell)], STEPS))
    assert found["fault"] == ""
    assert found["cell"]["transport"] == "gloo"


@pytest.mark.nightly
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("cell", "more"),
    [
        *((cell, {"recompute": "all"}) for cell in RECOMPUTING),
        *((cell, {"offload": ("state",)}) for cell in OFFLOADING),
    ],
)
def test_recomputed_stages_and_stores_are_equal_too(cell: str, more: dict[str, Any]) -> None:
    (found,) = matrix.rows([parse_cell(cell)], STEPS, **more)
    assert found.fault == ""


def test_the_table_has_every_cell_once() -> None:
    table = cells(MODELS, ("naive", "analytical", "scattered"), (2, 3, 4))
    assert len(table) == len(set(table)) == len(MODELS) * PER_MODEL
    real = [cell for cell in over_gloo(table, 6) if cell.transport == "gloo"]
    assert len(real) == len({cell.model for cell in real}) == 6
    assert parse_cell("gpt/naive/2/1f1b/gloo").transport == "gloo"


def test_a_zero_of_another_sign_is_seen() -> None:
    """Equal numbers are not enough: bytes are compared."""
    plus, minus = ({"w": torch.tensor([sign * 0.0])} for sign in (1, -1))
    assert other_bytes(Trace([], plus, plus), Trace([], plus, plus)) == ""
    assert other_bytes(Trace([], plus, plus), Trace([], plus, minus)) == "tensors w"
