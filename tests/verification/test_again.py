"""Capturing again what was split: a bundle that froze modules since is told apart from an edit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import ModelFile, capture, load_model_file
from bigbrain_fx.plan import Source, with_frozen
from bigbrain_fx.verification.child import capture_again
from tests.support.bundles import MODEL

FROZEN = """
def model():
    made = Net()
    made.get_submodule("blocks.0").requires_grad_(False)
    return made
"""


def loaded(folder: Path, text: str) -> ModelFile:
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(text)
    return load_model_file(str(folder / "letters.py"))


def frozen_plan(file: ModelFile) -> Any:
    graph = capture(file.model, file.example_batch, file.loss).graph
    frozen = with_frozen(replace(graph, training=True), ["blocks.0"])
    return SimpleNamespace(graph=frozen, source=Source("model.py"))


def test_parameters_frozen_since_are_named_with_a_remedy(tmp_path: Path) -> None:
    file = loaded(tmp_path / "own", MODEL)
    plan = frozen_plan(file)
    with pytest.raises(InputError, match=r"letters\.py trains blocks\.0\..*frozen") as caught:
        capture_again(file, plan)
    assert "--model" in str(caught.value.help)
    frozen = loaded(tmp_path / "copy", MODEL + FROZEN)
    assert capture_again(frozen, plan).graph.graded == plan.graph.graded


def test_an_edit_beside_it_is_another_graph(tmp_path: Path) -> None:
    plan = frozen_plan(loaded(tmp_path / "own", MODEL))
    edited = loaded(tmp_path / "edited", MODEL.replace("F.gelu", "F.relu"))
    with pytest.raises(InputError, match="gives another graph"):
        capture_again(edited, plan)
