"""Training by the order of a set of texts, which each process has its own: refused by split."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture_file, hash_order
from bigbrain_fx.frontend.hash_order import HASH_SEED, lines_of_sets, require_no_hash_order

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


def tried(folder: Path, letters: str) -> str | None:
    """Ask a capture of a file with such a vocabulary whether training goes by what is left."""
    path = folder / "letters.py"
    path.write_text(MODEL.format(letters=letters))
    with capture_file(path) as session:
        return session.try_calls((), trains=True)


@pytest.mark.nightly
def test_a_vocabulary_in_the_order_of_a_set_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        tried(tmp_path, "list(set(TEXT))")
    assert "batches() goes by the order of a set" in str(caught.value)
    assert caught.value.at == "letters.py:6"
    assert "sorted(set(words))" in str(caught.value.help)


@pytest.mark.nightly
def test_the_remedy_that_is_named_is_taken(tmp_path: Path) -> None:
    assert tried(tmp_path, "sorted(set(TEXT))") is None


@pytest.mark.parametrize(("third", "refused"), [("left", True), ("other", False)])
def test_what_moves_with_the_hash_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: str, refused: bool
) -> None:
    path = tmp_path / "some.py"
    path.write_text("import torch\na = list({'x', 'y'})")
    answers = iter([{"batches()": "left"}, {"batches()": "right"}, {"batches()": third}])
    monkeypatch.setattr(hash_order, "_found_with", lambda *_: next(answers))
    monkeypatch.delenv(HASH_SEED, raising=False)
    expected = pytest.raises(InputError, match="by the order of a set") if refused else None
    with expected or nullcontext():
        require_no_hash_order(path, {})


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
    monkeypatch.setenv(HASH_SEED, "0")
    require_no_hash_order(path, {})
