"""Training by the order of a set of texts, which each process has its own: refused by split."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx as bb
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.verification.rehearsal import (
    HASH_SEED,
    line_of_draw,
    line_of_set,
    lines_of_sets,
)
from tests.support.bundles import cluster

MODEL = """
import torch
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog again and again"
LETTERS = {letters}
PLACES = {{letter: place for place, letter in enumerate(LETTERS)}}


def model():
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


def batches(seed):
    while True:
        places = torch.tensor([PLACES[letter] for letter in TEXT])
        yield {{"input": places[:8], "y": places[1:9]}}


def example_batch():
    return next(batches(0))
"""


def split_file(folder: Path, letters: str) -> bb.Split:
    """Split a file with such a vocabulary over two devices."""
    path = folder / "letters.py"
    path.write_text(MODEL.format(letters=letters))
    options = bb.Options("naive", micro_batches=2, strict=True)
    return bb.split(path, cluster(2), folder / "b", options)


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_a_vocabulary_in_the_order_of_a_set_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        split_file(tmp_path, "list(set(TEXT))")
    assert (caught.value.code, caught.value.at) == ("BX3169", "letters.py:6")


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_the_remedy_that_is_named_is_taken(tmp_path: Path) -> None:
    assert split_file(tmp_path, "sorted(set(TEXT))").rehearsed


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = {'x', 'y'}", [1]),
        ("a = {1, 2}", []),
        ("a = sorted({'x', 'y'})", []),
        ("b = 'x' in {'x', 'y'}", []),
        ("b = 1\nc = [k for k in {t for t in words}]", [2]),
        ("n = len(set(words))", []),
        ("h = hash(word) % 10", [1]),
    ],
)
def test_lines_whose_order_may_count(tmp_path: Path, text: str, lines: list[int]) -> None:
    path = tmp_path / "some.py"
    path.write_text(text)
    assert list(lines_of_sets(path)) == lines


def test_a_hash_seed_that_the_user_has_set_holds_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.py"
    path.write_text("a = list({'x', 'y'})")
    monkeypatch.delenv(HASH_SEED, raising=False)
    assert line_of_set(path) == "some.py:1"
    monkeypatch.setenv(HASH_SEED, "0")
    assert line_of_set(path) is None


@pytest.mark.parametrize(
    ("top", "line"),
    [
        ("import random\nORDER = [1, 2]\nrandom.shuffle(ORDER)\n", "model.py:3"),
        ("import numpy as np\nX = np.random.rand(3)\n", "model.py:2"),
        ("import random\nrandom.seed(0)\nX = random.random()\n", None),
        ("import random\ndef draw():\n    return random.random()\n", None),
        ("import torch\nX = torch.rand(3)\n", None),
    ],
)
def test_the_first_unseeded_draw_at_the_top_is_named(
    top: str, line: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(top)
    assert line_of_draw(path) == line
