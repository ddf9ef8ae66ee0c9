"""Names that would break Python text, or hide a method of the runtime, survive the whole road."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.bundles.compile import split
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.frontend import load_model_file
from bigbrain_fx.plan import Options
from tests.support import samples

MODEL = Path(__file__).parents[2] / "support" / "odd_names.py"


@pytest.mark.nightly
def test_such_a_model_trains_bit_for_bit(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL.read_text())
    made = split(model, samples.cluster(2), tmp_path / "bundle", Options("naive", micro_batches=2))
    for path in sorted(made.bundle.glob("*.py")):
        ast.parse(path.read_text())
    verify(made.bundle, steps=2).require_passed()


@pytest.mark.nightly
def test_such_a_model_scattered_keeps_its_names() -> None:
    torch.manual_seed(0)
    file = load_model_file(MODEL)
    found = samples.of_module(file.model, file.example_batch, None)
    plan = samples.planned(found, "scattered", 3, None, 2)
    texts = bundle_texts(plan)
    held: set[str] = set()
    for device in plan.stages.devices:
        program: Any = samples.program(plan, texts, device)
        for stage in program.stages.values():
            held |= set(stage().place().state_dict())
    assert held == set(file.model.state_dict())
