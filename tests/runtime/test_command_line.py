"""The words of a bundle's program are its own: what the user's code parses finds none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bigbrain_fx.runtime.launcher import take, words


@pytest.mark.parametrize("name", ["train.py", "infer.py"])
def test_the_bundles_program_takes_its_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / name), "--steps", "3"])
    assert take(tmp_path) == ["--steps", "3"]
    assert sys.argv == [str(tmp_path / name)]


@pytest.mark.parametrize("program", ["other/train.py", "mine.py", ""])
def test_other_programs_keep_theirs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / program), "--steps", "3"])
    assert take(tmp_path) is None
    assert words() == ["--steps", "3"]
