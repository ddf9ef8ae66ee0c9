"""The words of a bundle's program are its own, and those of 0.2 still count."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from bigbrain_fx.runtime.checkpoint_options import add_options
from bigbrain_fx.runtime.launcher import take, words
from bigbrain_fx.supervisor.arguments import parser_of


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


# --------------------------------------------------------------------------- options of 0.2


@pytest.fixture
def train() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser


def test_train_py_takes_both_names(train: argparse.ArgumentParser) -> None:
    old = train.parse_args(["--commits", "c", "--commit-every", "7"])
    assert old == train.parse_args(["--checkpoint-dir", "c", "--checkpoint-every", "7"])
    assert (old.commits, old.commit_every) == (Path("c"), 7)
    assert train.parse_args([]).commits is None
    assert "--commit" not in train.format_help()


def test_launch_py_takes_both_names(tmp_path: Path) -> None:
    parser, folder = parser_of("train.py"), str(tmp_path)
    old = parser.parse_args(["--spares", "3", "--snapshot-every", "2", "--snapshots", folder])
    words = ["--standby", "3", "--memory-checkpoint-every", "2", "--memory-checkpoint-dir", folder]
    assert old == parser.parse_args(words)
    assert parser.parse_args([]).spares == 1
    assert not any(name in parser.format_help() for name in ("--spares", "--snapshot"))
