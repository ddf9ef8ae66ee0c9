"""Commits of a run: who writes what when, what a full disk does, and how a run goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from bigbrain_fx.runtime.checkpoint_format import CommitError, FencedError
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.checkpoints import Checkpoints, begin_together
from bigbrain_fx.runtime.disk import Disk
from bigbrain_fx.runtime.image import Buffer
from tests.runtime.test_state import OPTIMIZERS, One, device, everything, run
from tests.support.commit_disks import FullDisk, QuickDisk, steps_in
from tests.support.ledgers import local_ledger

ABOUT = {"plan": "p1", "graph": "g1"}
NAMES = ("d0", "d1")


def committers(
    folder: Path, every: int = 2, *, disk: Disk | None = None, **more: object
) -> dict[str, Checkpoints]:
    ledger, store = local_ledger(), CheckpointStore(folder, disk or QuickDisk())
    made = {
        name: Checkpoints(store, every, name, NAMES, ledger, ABOUT, **more)  # type: ignore[arg-type]
        for name in NAMES
    }
    return made


def single(folder: Path, every: int, disk: Disk | None = None) -> Checkpoints:
    """Return the checkpoints of the only device."""
    store = CheckpointStore(folder, disk or Disk())
    return Checkpoints(store, every, "d0", ["d0"], local_ledger(), ABOUT)


def devices() -> dict[str, One]:
    return {name: device(OPTIMIZERS["adamw"]) for name in NAMES}


def train(made: dict[str, One], parts: dict[str, Checkpoints], first: int, last: int) -> None:
    for step in range(first, last):
        for name, each in made.items():
            each.run_step(step)
            parts[name].after_step(each, step)
    for part in parts.values():
        part.settle()


@pytest.mark.nightly
def test_a_run_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    folder, made = tmp_path / "commits", devices()
    parts = committers(folder)
    assert begin_together(parts, made, resume=False) == 0
    train(made, parts, 0, 5)
    assert steps_in(folder) == [4, 2]
    others = devices()
    again = committers(folder)
    assert begin_together(again, others, resume=True) == 4
    whole = device(OPTIMIZERS["adamw"])
    run(whole, 0, 4)
    assert everything(others["d0"]) == everything(whole)
    train(others, again, 4, 8)
    run(whole, 4, 8)
    assert everything(others["d1"]) == everything(whole)
    assert [(r.step, r.generation) for r in CheckpointStore(folder).records()] == [
        (8, 2),
        (6, 2),
    ]


def test_a_new_run_commits_its_start(tmp_path: Path) -> None:
    parts = committers(tmp_path / "commits", every=0)
    begin_together(parts, devices(), resume=False)
    assert steps_in(tmp_path / "commits") == [0]


def test_the_end_is_committed(tmp_path: Path) -> None:
    made, parts = devices(), committers(tmp_path / "commits", every=0, in_background=False)
    begin_together(parts, made, resume=False)
    train(made, parts, 0, 3)
    for name, part in parts.items():
        part.close(made[name])
    assert steps_in(tmp_path / "commits") == [3, 0]


@pytest.mark.nightly
def test_a_new_run_does_not_begin_over_an_old_one(tmp_path: Path) -> None:
    begin_together(committers(tmp_path / "commits"), devices(), resume=False)
    with pytest.raises(CommitError, match="has checkpoints up to step 0: add --resume"):
        begin_together(committers(tmp_path / "commits"), devices(), resume=False)


def test_resume_without_a_commit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="comits is not there"):
        begin_together(committers(tmp_path / "comits"), devices(), resume=True)
    assert not (tmp_path / "comits").exists()


def test_a_restart_goes_on_if_it_can_and_says_which_mode_this_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for expected in (0, 3):
        made = device(OPTIMIZERS["sgd"])
        part = single(tmp_path / "commits", 3)
        assert part.begin(made, resume=False, restarted=True) == expected
        run(made, expected, 3)
        part.after_step(made, 2)
        part.settle()
    said = capsys.readouterr().err
    assert "restarted: all devices go on from the last checkpoint; none kept its state" in said
    assert "going on from the checkpoint of step 3" in said


def test_a_restart_is_not_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run that was refused is not let in by its launcher's second try."""
    begin_together(committers(tmp_path / "commits"), devices(), resume=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    part = single(tmp_path / "commits", 3)
    with pytest.raises(CommitError, match="add --resume"):
        part.begin(device(OPTIMIZERS["sgd"]), resume=False, restarted=True)


def test_all_devices_go_back_when_one_finds_its_part_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = tmp_path / "commits", devices()
    parts = committers(folder)
    begin_together(parts, made, resume=False)
    train(made, parts, 0, 4)
    (folder / "commit-4-g1" / "d1.safetensors").write_bytes(b"")
    others, again = devices(), committers(folder)
    assert begin_together(again, others, resume=True) == 2
    assert "d1.safetensors" in (said := capsys.readouterr().err)
    assert "going back to the older checkpoint of step 2" in said
    train(others, again, 2, 4)
    assert [(r.step, r.generation) for r in CheckpointStore(folder).records()] == [
        (4, 2),
        (2, 1),
    ]


def test_a_full_disk_misses_commits_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, made = FullDisk(), devices()
    parts = committers(tmp_path / "commits", disk=disk)
    begin_together(parts, made, resume=False)
    train(made, parts, 0, 2)
    disk.full = True
    train(made, parts, 2, 6)
    said = capsys.readouterr().err
    assert said.count("WARNING: no checkpoint at step 4: d0 cannot write") == 1
    assert said.count("WARNING: no checkpoint at step 6") == 2  # each device says what it missed
    assert steps_in(tmp_path / "commits") == [2, 0]
    assert not list((tmp_path / "commits").rglob("*.tmp"))
    disk.full = False
    train(made, parts, 6, 8)
    assert steps_in(tmp_path / "commits") == [8, 2]


def alone(folder: Path, disk: Disk) -> tuple[Checkpoints, list[dict[str, object]]]:
    """Return the checkpoints of the only device, and the events that it tells."""
    part = single(folder, 1, disk)
    told: list[dict[str, object]] = []
    part.misses.tell = lambda event, step, facts: told.append({"event": event, **facts})
    return part, told


def test_any_number_of_missed_commits_ends_no_run_and_the_last_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, made = FullDisk(), device(OPTIMIZERS["sgd"])
    part, told = alone(tmp_path / "c", disk)
    part.begin(made, resume=False)
    disk.full = True
    train({"d0": made}, {"d0": part}, 0, 25)
    disk.full = False
    train({"d0": made}, {"d0": part}, 25, 26)
    disk.full = True
    train({"d0": made}, {"d0": part}, 26, 28)
    part.close(made)
    assert [entry["event"] for entry in told] == (
        ["missed"] * 25 + ["committed_again"] + ["missed"] * 2 + ["at_risk"]
    )
    assert [entry["row"] for entry in told[:3]] == [1, 2, 3]
    assert told[-1] == {"event": "at_risk", "step": 28, "missed": 2, "newest": 26}
    assert (
        "what was trained up to step 28 is in the files of --save only" in capsys.readouterr().err
    )


@pytest.mark.gate("removed")
@pytest.mark.parametrize("breaks", ["removed", "not ours"])
def test_a_folder_of_commits_that_is_gone_ends_no_run(tmp_path: Path, breaks: str) -> None:
    made = device(OPTIMIZERS["sgd"])
    part, told = alone(tmp_path / "c", Disk())
    part.begin(made, resume=False)
    shutil.rmtree(tmp_path / "c")
    if breaks == "not ours":
        (tmp_path / "c").write_text("a file")
    train({"d0": made}, {"d0": part}, 0, 3)
    part.close(made)
    assert [entry["event"] for entry in told] == ["missed"] * 3 + ["at_risk"]


@pytest.mark.gate("error2")
@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(5, "I/O error"), ValueError()])
def test_whatever_a_write_raises_is_a_missed_commit(tmp_path: Path, error: Exception) -> None:
    """The others wait for a word from the thread that writes."""

    class Failing(QuickDisk):
        fails = False

        def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
            if self.fails:
                raise error
            super().write(path, pieces)

    disk, made = Failing(), devices()
    parts = committers(tmp_path / "commits", disk=disk)
    begin_together(parts, made, resume=False)
    disk.fails = True
    train(made, parts, 0, 4)
    assert parts["d0"].misses.count == 2


def test_a_full_log_stops_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning's own print must not keep the others from hearing of the miss."""
    disk, made = FullDisk(), devices()
    parts = committers(tmp_path / "commits", disk=disk)
    begin_together(parts, made, resume=False)
    disk.full = True
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        train(made, parts, 0, 4)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    disk.full = False
    train(made, parts, 4, 6)
    assert steps_in(tmp_path / "commits") == [6, 0]


def test_a_run_that_was_replaced_stops(tmp_path: Path) -> None:
    made, parts = devices(), committers(tmp_path / "commits")
    begin_together(parts, made, resume=False)
    CheckpointStore(tmp_path / "commits").begin_generation()
    with pytest.raises(FencedError, match="generation 1 was replaced by 2"):
        train(made, parts, 0, 2)
    assert steps_in(tmp_path / "commits") == [0]


def test_another_graph_is_refused_by_all(tmp_path: Path) -> None:
    begin_together(committers(tmp_path / "commits"), devices(), resume=False)
    parts = committers(tmp_path / "commits")
    parts["d1"].about["graph"] = "other"
    with pytest.raises(CommitError, match="graph: expected 'other', found 'g1'"):
        begin_together(parts, devices(), resume=True)


@pytest.mark.nightly
def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    class Slow(QuickDisk):
        def __init__(self) -> None:
            self.go = threading.Event()
            self.go.set()

        def sync(self, folder: Path) -> None:
            assert self.go.wait(60)

    disk, made = Slow(), device(OPTIMIZERS["sgd"])
    part = single(tmp_path / "c", 2, disk)
    part.begin(made, resume=False)
    disk.go.clear()
    run(made, 0, 2)
    part.after_step(made, 1)
    run(made, 2, 3)  # the state is copied: this step cannot change it
    disk.go.set()
    part.settle()
    other = device(OPTIMIZERS["sgd"])
    again = single(tmp_path / "c", 2)
    assert again.begin(other, resume=True) == 2
    whole = device(OPTIMIZERS["sgd"])
    run(whole, 0, 2)
    assert everything(other) == everything(whole)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CommitError, match="Permission denied"):
        begin_together(committers(tmp_path / "commits"), devices(), resume=False)
