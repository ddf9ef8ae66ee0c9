"""Logs of the last few runs lie in the bundle; older ones go, but not those of runs at work."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch.run_folders import KEPT_RUNS, run_folder
from bigbrain_fx.bundles.launch.status import RUNS, Status, StatusKeeper, read_status
from bigbrain_fx.weights import Scratch


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder that is taken for a bundle."""
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


def begun(bundle: Path, pid: int | None = None, host: str = platform.node()) -> StatusKeeper:
    """Begin a run, as `run` does."""
    logs = run_folder(bundle)
    return StatusKeeper(
        Status(str(bundle.resolve()), pid or os.getpid(), str(logs), rows=8, host=host)
    )


def kept(bundle: Path) -> list[str]:
    return sorted(path.name for path in (bundle / RUNS).iterdir())


def ended_pid() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def test_runs_are_numbered_and_the_last_few_stay(bundle: Path) -> None:
    for _ in range(KEPT_RUNS + 3):
        begun(bundle).end("finished")
    assert kept(bundle) == [str(number) for number in range(4, 4 + KEPT_RUNS)]


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_the_logs_of_a_run_at_work_stay(bundle: Path, state: str) -> None:
    begun(bundle)  # it goes on
    for _ in range(KEPT_RUNS + 2):
        begun(bundle).end(state)
    assert "1" in kept(bundle)
    assert len(kept(bundle)) == KEPT_RUNS + 1


@pytest.mark.parametrize(("host", "stays"), [(platform.node(), False), ("another", True)])
def test_the_logs_of_a_run_killed_on_this_host_go(bundle: Path, host: str, stays: bool) -> None:
    begun(bundle, ended_pid(), host)
    for _ in range(KEPT_RUNS):
        begun(bundle).end("finished")
    assert ("1" in kept(bundle)) == stays


def test_folders_of_other_things_stay(bundle: Path) -> None:
    (bundle / RUNS / "mine").mkdir(parents=True)
    (bundle / RUNS / "1").mkdir()  # it has no status yet
    for _ in range(KEPT_RUNS + 1):
        begun(bundle).end("finished")
    assert {"1", "mine"} <= set(kept(bundle))


def test_the_newest_run_of_a_bundle_is_found_there(bundle: Path) -> None:
    begun(bundle).end("failed")
    begun(bundle).end("finished")
    assert read_status(bundle).state == "finished"


def test_a_bundle_that_takes_no_folder_has_logs_elsewhere(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundle / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(bundle / "elsewhere"))
    (bundle / RUNS).write_text("a file of the user's")
    logs = run_folder(bundle)
    assert logs.parent == bundle / "elsewhere"
    keeper = StatusKeeper(Status(str(bundle.resolve()), os.getpid(), str(logs), rows=8))
    keeper.end("finished")
    assert read_status(bundle).logs == str(logs)


def test_a_folder_that_is_no_bundle_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    assert run_folder(tmp_path).parent == tmp_path / "elsewhere"
    assert not (tmp_path / RUNS).exists()


def test_logs_outlive_a_bundle_that_goes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Scratch("machine") as scratch:
        (Path(scratch) / "plan.json").write_text("{}")
        logs = run_folder(Path(scratch))
    assert logs.is_dir()
