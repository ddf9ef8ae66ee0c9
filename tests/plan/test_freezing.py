"""Freezing a graph's modules: what capture gives of the model that is frozen in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import with_frozen
from tests.support.bundles import MODEL

APART = MODEL.replace("        self.head.weight = self.embed.weight\n", "")
FROZEN = """
def model():
    made = Net()
    for name in {names}:
        made.get_submodule(name).requires_grad_(False)
    return made
"""


def captured(folder: Path, text: str) -> Graph:
    path = folder / "letters.py"
    path.write_text(text)
    file = load_model_file(str(path))
    return capture(file.model, file.example_batch, file.loss).graph


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "asked", "names"),
    [
        (APART, ["embed"], ["embed"]),
        (APART, ["embed", "blocks.0-2"], ["embed", "blocks.0", "blocks.1", "blocks.2"]),
        (APART, ["blocks.1-2", "head"], ["blocks.1", "blocks.2", "head"]),
        (MODEL, ["embed", "blocks.0"], ["embed", "blocks.0"]),
    ],
    ids=["first", "prefix", "between", "tied"],
)
def test_a_frozen_graph_is_that_of_a_model_frozen_in_its_file(
    tmp_path: Path, text: str, asked: list[str], names: list[str]
) -> None:
    made = with_frozen(captured(tmp_path, text), asked)
    (tmp_path / "frozen").mkdir()
    wanted = captured(tmp_path / "frozen", text + FROZEN.format(names=names))
    assert [(p.name, p.spec) for p in made.params] == [(p.name, p.spec) for p in wanted.params]
    assert [(op.name, op.outputs) for op in made.ops] == [
        (op.name, op.outputs) for op in wanted.ops
    ]
    assert made.graded == wanted.graded


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    graph = captured(tmp_path, APART)
    with pytest.raises(InputError, match=r"there is no module 'block\.1'") as no:
        with_frozen(graph, ["block.1"])
    assert "blocks.1" in str(no.value.help)
    with pytest.raises(InputError, match=r"there is no module 'blocks\.4'"):
        with_frozen(graph, ["blocks.2-4"])
    frozen = with_frozen(graph, ["embed"])
    with pytest.raises(InputError, match="nothing of 'embed' is trained"):
        with_frozen(frozen, ["embed"])
    with pytest.raises(InputError, match="nothing is left to train"):
        with_frozen(frozen, ["blocks", "norm", "head"])
