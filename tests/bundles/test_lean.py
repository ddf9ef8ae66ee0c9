"""A bundle of `split --lean` trains, replaces no process, and says so when asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bigbrain_fx import InputError, Options, RunOptions, resplit, run, run_elastic, split
from bigbrain_fx.emit import PARTS, extras_of, ways_into
from tests.support import warm
from tests.support.bundles import MODEL, cluster
from tests.support.command_line import call

CHOICES = Options("naive", schedule="1f1b", micro_batches=2)


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lean")
    (folder / "letters.py").write_text(MODEL)
    return split(folder / "letters.py", cluster(), folder / "lean", CHOICES, lean=True).bundle


def test_a_lean_bundle_neither_has_nor_names_a_supervisor(lean: Path) -> None:
    held = {path.name for path in lean.iterdir()}
    assert {"train.py", "training.py", "runtime", "weights"} <= held
    assert not {"launch.py", "supervisor"} & held
    runtime = {path.stem for path in (lean / "runtime").iterdir()}
    tied = {"copies"}  # what its tied weight needs
    assert not (ways_into(PARTS, "runtime") - tied) & runtime
    assert not {"replay", "snapshots", "board"} & runtime
    said = (lean / "README.md").read_text() + (lean / "train.py").read_text().split('"""')[1]
    assert "launch.py" not in said
    assert "torchrun" in said


def test_run_starts_it_and_resplit_keeps_it_lean(lean: Path, tmp_path: Path) -> None:
    done = call("run", lean, "--steps", "2", "--checkpoint-dir", lean / "commits", "--json")
    assert done.code == 0, done.err
    assert [line["step"] for line in done.objects if "step" in line] == [0, 1]
    moved = resplit(lean, cluster(1), tmp_path / "moved").bundle
    assert not (moved / "launch.py").exists()
    assert not (moved / "runtime" / "member.py").exists()
    assert "launch.py" not in (moved / "README.md").read_text()


@pytest.mark.nightly
def test_a_lean_bundle_checks_batches_on_request(lean: Path, tmp_path: Path) -> None:
    assert extras_of(lean) == ()
    assert not (lean / "runtime" / "data.py").exists()
    model = lean.parent / "letters.py"
    given = {"lean": True, "extras": ("checks",)}
    checked = split(model, cluster(), tmp_path / "checked", CHOICES, **given).bundle  # type: ignore[arg-type]
    assert extras_of(checked) == ("checks",)
    assert {path.name for path in (checked / "runtime").iterdir()} >= {"data.py", "entries.py"}
    losses = []
    for bundle in (lean, checked):
        words = [sys.executable, "train.py", "--in-process", "--steps", "2", "--json"]
        done = warm.run(words, cwd=bundle, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line)["loss"] for line in done.stdout.splitlines()])
    assert losses[0] == losses[1]


def test_spares_are_refused(lean: Path) -> None:
    done = call("run", lean, "--steps", "2", "--standby", "1")
    assert done.code == 2
    assert "split again without --lean" in done.err
    for start in (run, run_elastic):
        with pytest.raises(InputError, match="split again without --lean"):
            start(lean, RunOptions(steps=2, spares=1))


def test_inference_has_nothing_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(MODEL)
    options = Options("naive", mode="eval", micro_batches=2)
    with pytest.raises(InputError, match="leave --lean out"):
        split(tmp_path / "letters.py", cluster(), tmp_path / "out", options, lean=True)
    assert not (tmp_path / "out").exists()
