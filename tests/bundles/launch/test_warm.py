"""Forks of a process that has torch: they are what a new Python would be, and their end is seen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch.warm import ForkedGroup, Warm
from bigbrain_fx.supervisor import DeviceProcess, Group, Order
from tests.support.killing import wait_for_end

LIMIT_S = 120.0
PROGRAM = """
import json, os, random, sys, threading
import torch
said = {"words": sys.argv, "folder": os.getcwd(), "own": os.environ["OWN"], "first": sys.path[0],
        "dice": random.random(), "session": os.getsid(0), "torch": torch.initial_seed(),
        "line": os.read(0, 10).decode(), "main": __name__,
        "files": sorted(os.listdir("/proc/self/fd"))}
print(json.dumps(said))
threading.Thread(target=lambda: open("thread", "w").close()).start()
"""
OWN = 'import json, os; print(json.dumps({"own": os.environ["OWN"]}))'


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as made:
        yield made


def start(
    warm: Warm, folder: Path, ends: str = "", program: str = PROGRAM, **own: str
) -> DeviceProcess:
    """Start a program that reads a word from its line, says what it finds, and ends so."""
    (folder / "train.py").write_text(program + ends)
    shared = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**shared, "OWN": "", "BIGBRAIN_CONTROL": ends}
    ours, theirs = socket.socketpair()
    ours.send(b"begin")
    with ours, theirs:
        words = (sys.executable, "train.py", "--steps", "1")
        where = folder / "log"
        return warm(Order("d0", words, folder, {**environment, **own}, theirs.fileno(), where))


def said(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "log").read_text().splitlines()[0])
    return found


@pytest.mark.usefixtures("cold")
def test_a_fork_is_what_a_new_python_would_be(tmp_path: Path) -> None:
    with Warm() as warm:
        seen_in_a_fork(warm, tmp_path)


def seen_in_a_fork(warm: Warm, tmp_path: Path) -> None:
    process = start(warm, tmp_path)
    assert isinstance(process, ForkedGroup)
    assert process.wait(LIMIT_S) == 0
    found = said(tmp_path)
    assert found["words"] == ["train.py", "--steps", "1"]
    assert found["folder"] == found["first"] == str(tmp_path)
    assert (found["main"], found["line"]) == ("__main__", "begin")
    assert found["session"] == process.pid
    assert found["files"] == ["0", "1", "2", "3"]  # the last is that of the listing
    assert (tmp_path / "thread").exists()
    dice = found["dice"]
    assert start(warm, tmp_path).wait(LIMIT_S) == 0
    assert said(tmp_path)["dice"] != dice


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit('it is over')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os._exit(3)", 3),
    ],
)
def test_the_exit_code_of_a_fork_is_reported(
    warm: Warm, tmp_path: Path, ends: str, code: int
) -> None:
    process = start(warm, tmp_path, ends)
    assert process.wait(LIMIT_S) == code
    assert process.poll() == code
    words = {"sys.exit('it is over')": "it is over", "1 / 0": "ZeroDivisionError"}
    assert words.get(ends, "") in (tmp_path / "log").read_text()


def test_processes_started_by_a_fork_end_with_it(warm: Warm, tmp_path: Path) -> None:
    ends = "import subprocess; open('pid', 'w').write(str(subprocess.Popen(['sleep', '999']).pid))"
    assert start(warm, tmp_path, ends).wait(LIMIT_S) == 0
    wait_for_end(int((tmp_path / "pid").read_text()))


def test_one_that_waits_can_be_ended(warm: Warm, tmp_path: Path) -> None:
    process = start(warm, tmp_path, "threading.Event().wait()")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_another_environment_is_a_new_pythons(warm: Warm, tmp_path: Path) -> None:
    assert start(warm, tmp_path, program=OWN).wait(LIMIT_S) == 0
    process = start(warm, tmp_path, program=OWN, OWN="other")
    assert type(process) is Group
    assert process.wait(LIMIT_S) == 0
    assert said(tmp_path)["own"] == "other"


def test_without_a_warm_process_new_pythons_are_started(tmp_path: Path) -> None:
    with Warm() as warm:
        first = start(warm, tmp_path, program="")
        assert first.wait(LIMIT_S) == 0
        assert warm._forking is not None
        forking = warm._forking._process
        forking.kill()
        forking.wait()
        process = start(warm, tmp_path, program="")
        assert type(process) is Group
        assert process.wait(LIMIT_S) == 0
