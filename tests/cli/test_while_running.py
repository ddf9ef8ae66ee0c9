"""What a run leaves besides its lines: CSV, its pace beside the forecast."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bigbrain_fx.bundles import free_port, metrics_at, read_status
from bigbrain_fx.bundles.launch import Run, StepLine
from bigbrain_fx.bundles.launch.status import Status, StatusKeeper
from bigbrain_fx.bundles.launch.step_files import step_files
from bigbrain_fx.errors import InputError
from tests.support.command_line import call


def test_a_run_says_its_pace_and_writes_its_steps(bundle: Path, tmp_path: Path) -> None:
    files = tmp_path / "steps.csv", tmp_path / "again.csv"
    words = ("--steps", "4", "--log-every", "2", "--log-to", files[0], "--log-to", files[1])
    done = call("run", bundle, "--no-replay", *words, "--logs", tmp_path / "logs")
    assert done.code == 0, done.err
    assert re.findall(r"^step +(\d)", done.out, re.MULTILINE) == ["0", "2", "3"]
    assert re.search(r"median [\d.]+ s a step, [\d,.]+ rows/s; forecast [\d.]+ s", done.out)
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[2]["rows_per_s"]) == pytest.approx(8 / float(rows[2]["step_s"]))
    assert files[1].read_text() == files[0].read_text()
    (told,) = call("status", tmp_path / "logs", "--json").objects
    assert (told["state"], told["steps_done"], told["steps"]) == ("finished", 4, 4)
    assert told["loss"] == float(rows[3]["loss"])
    assert sorted(told["devices"]) == ["d0", "d1"]


def test_a_file_of_steps_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="steps cannot be written"),
        step_files([tmp_path / "file" / "steps.csv"], 8),
    ):
        pass


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for step in (0, 1):
        with step_files([tmp_path / "steps.csv"], 8) as files:
            files.step(StepLine(step, 1.5, 0.25))
    lines = (tmp_path / "steps.csv").read_text().split()
    assert lines == ["step,loss,step_s,rows_per_s", "0,1.5,0.25,32.0", "1,1.5,0.25,32.0"]


def test_the_first_step_is_no_pace() -> None:
    steps = tuple(StepLine(i, 1.0, s) for i, s in enumerate((9.0, 1.0, 2.0, 3.0)))
    assert Run(steps, {}, Path("logs")).median_s == 2.0
    assert Run(steps[:1], {}, Path("logs")).median_s is None


# --------------------------------------------------------------------------- status


def kept(logs: Path, **facts: object) -> StatusKeeper:
    logs.mkdir(exist_ok=True)
    return StatusKeeper(Status("/b", os.getpid(), str(logs), 8, steps=10, **facts))  # type: ignore[arg-type]


def test_a_full_disk_keeps_the_last_status_in_place_of_the_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = kept(tmp_path, commits="x" * 100)

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    keeper.end("finished")
    assert read_status(tmp_path).state == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_status_follows_steps_and_deaths(tmp_path: Path) -> None:
    keeper = kept(tmp_path / "logs")
    keeper.hear_event({"event": "started", "device": "d0", "pid": 7})
    keeper.hear_event({"event": "died", "device": "d0", "pid": 7})
    keeper.hear_event({"event": "assigned", "device": "d0", "pid": 9})
    keeper.hear_step(StepLine(3, 1.25, 0.5))
    keeper.end("failed")
    found = read_status(tmp_path / "logs")
    assert found == keeper.status
    assert (found.steps_done, found.restarts, found.devices) == (4, 1, {"d0": 9})
    assert found.rows_per_s == 16.0
    (tmp_path / "logs" / "run.log").write_text("error: why\n")
    text = call("status", tmp_path / "logs").out
    assert text.rstrip().endswith(f"see {tmp_path / 'logs' / 'run.log'}")
    assert "/b: failed, 4 of 10 steps done\nloss 1.250000, 0.5000 s a step, 16.0 rows" in text
    assert "processes replaced: 1" in text


def test_a_run_that_was_killed_says_so_by_its_process(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    keeper = kept(tmp_path / "logs")
    assert not keeper.status.is_alone
    assert dataclasses.replace(keeper.status, pid=gone.pid).is_alone


WHOLE: dict[str, object] = {"bundle": "/b", "pid": 1, "logs": "/l", "rows": 8}
BROKEN: list[dict[str, object]] = [
    {"pid": "x"},
    {"rows": "8"},
    {"devices": [1]},
    {"loss": "a"},
    {"updated": None},
]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"bundle": 1}', "[" * 50_000),
        *(json.dumps(WHOLE | wrong) for wrong in BROKEN),
    ],
)
def test_folders_without_a_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    done = call("status", tmp_path)
    assert (done.code, "there is no status of a run" in done.err) == (2, True)
    assert "no file or folder nothere" in call("status", "nothere").err


def test_prometheus_is_answered_on_loopback(tmp_path: Path) -> None:
    keeper, port = kept(tmp_path / "logs"), free_port()
    keeper.hear_step(StepLine(3, 1.25, 0.5))
    with metrics_at(port, lambda: keeper.status):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with (
            pytest.raises(InputError, match=f"port {port} is in use"),
            metrics_at(port, lambda: keeper.status),
        ):
            pass
    assert "# TYPE bigbrain_fx_steps_total counter\nbigbrain_fx_steps_total 4\n" in text
    assert "bigbrain_fx_loss 1.25\n" in text
    assert "bigbrain_fx_last_commit_step" not in text
    assert "bigbrain_fx_running 1\n" in text


def test_a_refusal_in_the_background_ends_the_command(bundle: Path, tmp_path: Path) -> None:
    words = ("--background", "--logs", tmp_path / "logs", "--inputs", tmp_path / "none", "--json")
    refused = call("run", bundle, *words)
    assert refused.code == 2
    assert refused.out == ""
    assert "--inputs cannot be given: this bundle trains" in refused.err


def test_a_run_that_goes_on_says_from_where(tmp_path: Path) -> None:
    keeper = StatusKeeper(Status("b", os.getpid(), str(tmp_path), 8, 9))
    keeper.begin(5)
    assert read_status(tmp_path).steps_done == 5


@pytest.mark.parametrize("name", ["steps.txt", "board"])
def test_steps_go_to_csv_files_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught, step_files((tmp_path / name,), 1):
        pass
    assert caught.value.code == "BX3073"
    assert not (tmp_path / name).exists()
    with step_files((tmp_path / "S.CSV",), 1):
        assert (tmp_path / "S.CSV").is_file()


@pytest.mark.nightly
def test_a_run_in_the_background_leaves_its_lines(bundle: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    words = ("--steps", "1", "--no-replay", "--background", "--logs", logs, "--json")
    (told,) = call("run", bundle, *words).objects
    os.waitpid(told["pid"], 0)
    assert read_status(logs).state == "finished"
    assert [json.loads(line)["step"] for line in (logs / "run.log").read_text().splitlines()] == [0]
