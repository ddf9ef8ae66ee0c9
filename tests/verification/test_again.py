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
from tests.support.command_line import MODEL

FROZEN = """
def model():
    made = Net()
    made.layers[0].requires_grad_(False)
    return made
"""


def loaded(folder: Path, text: str) -> ModelFile:
    folder.mkdir(exist_ok=True)
    (folder / "linears.py").write_text(text)
    return load_model_file(str(folder / "linears.py"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return loaded(tmp_path_factory.mktemp("own"), MODEL)


@pytest.fixture(scope="module")
def plan(file: ModelFile) -> Any:
    graph = capture(file.model, file.example_batch, file.loss).graph
    frozen = with_frozen(replace(graph, training=True), ["layers.0"])
    return SimpleNamespace(graph=frozen, source=Source("model.py"))


def test_parameters_frozen_since_are_named_with_a_remedy(
    file: ModelFile, plan: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"linears\.py trains layers\.0\..*frozen") as caught:
        capture_again(file, plan)
    assert "--model" in str(caught.value.help)
    frozen = loaded(tmp_path / "copy", MODEL + FROZEN)
    assert capture_again(frozen, plan).graph.graded == plan.graph.graded


def test_an_edit_beside_it_is_another_graph(plan: Any, tmp_path: Path) -> None:
    edited = loaded(tmp_path / "edited", MODEL.replace("torch.tanh", "torch.relu"))
    with pytest.raises(InputError, match="gives another graph"):
        capture_again(edited, plan)
