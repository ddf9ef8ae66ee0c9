"""What a bundle is asked to have beside what its plan needs, or to do without."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bigbrain_fx import InputError, Options, RunOptions, resplit, run, run_elastic, split
from bigbrain_fx.bundles.target import Target
from bigbrain_fx.emit import EXTRAS, PARTS, Weights, extras_of, ways_into
from bigbrain_fx.plan import make_plan, read_plan
from tests.support import warm
from tests.support.bundles import MODEL, cluster
from tests.support.command_line import call
from tests.support.messages import refused

CHAIN = Options("naive", schedule="1f1b", micro_batches=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extras") / "letters.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return split(model, cluster(), model.parent / "plain", CHAIN).bundle


def test_a_bundle_has_what_was_asked_for_and_so_has_one_made_of_it(
    model: Path, plain: Path, tmp_path: Path
) -> None:
    assert extras_of(plain) == ()
    full = split(model, cluster(), tmp_path / "full", CHAIN, extras=EXTRAS).bundle
    assert extras_of(full) == EXTRAS
    run(full, RunOptions(1, commits=full / "commits"))
    assert extras_of(resplit(full, cluster(1), tmp_path / "moved").bundle) == EXTRAS


@pytest.mark.nightly
def test_generators_of_the_model_files_own_bring_what_keeps_them(
    model: Path, plain: Path, tmp_path: Path
) -> None:
    assert not (plain / "runtime" / "own_dice.py").exists()
    (tmp_path / "letters.py").write_text(model.read_text() + "\nDICE = torch.Generator()\n")
    rolled = split(tmp_path / "letters.py", cluster(), tmp_path / "rolled", CHAIN).bundle
    assert (rolled / "runtime" / "own_dice.py").exists()
    assert extras_of(rolled) == ("generators",)  # as one that is made of it


def test_a_run_names_the_extra_that_its_flag_wants(plain: Path) -> None:
    with refused("BX3165", InputError) as error:
        run(plain, RunOptions(2, spares=1, suspect=0.5))
    assert "--with suspicion" in str(error.value.help)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "words", "name"),
    [
        ("train.py", ["--transport", "mpi"], "mpi"),
        ("launch.py", ["--suspect", "0.5", "--standby", "1"], "suspicion"),
        ("launch.py", ["--hang", "5"], "watch"),
    ],
)
def test_the_bundle_itself_names_the_missing_extra(
    plain: Path, program: str, words: list[str], name: str
) -> None:
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677"}
    how = {"cwd": plain, "capture_output": True, "text": True, "timeout": 120}
    done = warm.run([sys.executable, program, *words], env={**where}, **how)  # type: ignore[arg-type]
    assert done.returncode == 2
    assert f"--with {name}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_plan_of_several_hosts_says_what_replaces_processes_there(
    model: Path, tmp_path: Path
) -> None:
    bundle = split(model, cluster(2, ("north", "south")), tmp_path / "b", CHAIN).bundle
    how = {"cwd": bundle, "capture_output": True, "text": True, "timeout": 120}
    done = warm.run([sys.executable, "launch.py", "--listen", "127.0.0.1:0"], **how)  # type: ignore[arg-type]
    assert (done.returncode, "--with hosts" in done.stderr) == (2, True)
    printed = call("run", bundle)
    assert printed.code == 2
    assert "BX3165" in printed.err
    assert "--with hosts" in printed.err
    assert call("run", bundle, "--no-replay").code == 0  # a command a device


@pytest.mark.parametrize(
    ("code", "training", "options", "lean", "extras"),
    [
        ("BX3162", False, CHAIN, False, ("mpi",)),
        ("BX3163", True, CHAIN, True, ("suspicion",)),
        ("BX3164", True, Options("naive", replicas=2, micro_batches=2), False, ("pipelining",)),
        ("BX3163", True, CHAIN, True, ("hosts",)),
        ("BX3163", True, CHAIN, True, ("watch",)),
    ],
)
def test_an_extra_without_use_is_refused_and_nothing_written(
    plain: Path,
    tmp_path: Path,
    code: str,
    training: bool,
    options: Options,
    lean: bool,
    extras: tuple[str, ...],
) -> None:
    known = read_plan(plain)
    plan = make_plan(known.graph, cluster(), known.source, options)
    plan = replace(plan, graph=replace(plan.graph, training=training))
    with refused(code, InputError):
        Target(tmp_path / "out", lean=lean, extras=extras).write(plan, cast(Weights, None))
    assert not (tmp_path / "out").exists()


def test_an_unknown_extra_is_refused_before_the_capture(tmp_path: Path) -> None:
    with refused("BX3161", InputError):
        Target(tmp_path / "out", extras=("mqi",)).require()


def test_the_command_line_takes_several(model: Path, tmp_path: Path) -> None:
    devices = model.parent / "plain" / "plan.json"
    done = call("split", model, "--with", "mpi,nothing", "-o", tmp_path / "out", "--like", devices)
    assert done.code == 2
    assert "BX3161" in done.err


# --------------------------------------------------------------------------- --lean


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
