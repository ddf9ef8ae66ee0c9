"""What a bundle has for replay: launch.py without bigbrain-fx, and places for the user's hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import RunOptions, free_port, run
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.supervisor import Event
from tests.support.bundles import cluster, copied, edit, is_running, split_small
from tests.support.certificates import make
from tests.support.killing import kill_once

DEADLINE_S = 300.0  # a busy machine imports torch for half a minute; a lost link costs a whole one
COUNTED = """
SEEN = []
HOOKS.on_step_begin.append(lambda device, step: SEEN.append(("begin", device.name, step)))
HOOKS.on_step_end.append(lambda device, step: SEEN.append(("end", device.name, step)))
HOOKS.on_send.append(lambda device, channel, tensor: SEEN.append(("send", channel.tag, tensor)))
HOOKS.on_recv.append(lambda device, channel, tensor: SEEN.append(("recv", channel.tag, tensor)))

if __name__ == "__main__":
    from runtime import run_in_process

    run_in_process(BUNDLE, 1, 0)
    print(*(entry[:2] for entry in SEEN), sep="\\n")
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("replay_bundle"))


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.nightly
def test_launch_py_replaces_a_process(bundle: Path, tmp_path: Path) -> None:
    """With new Pythons only, as a user has it; the losses are those of one process."""
    copy = copied(bundle, tmp_path)
    kill_once(copy)
    edit(copy / "train.py", "from pathlib", "import os\nfrom pathlib")
    plain = python(bundle, "train.py", "--in-process", "--json", "--steps", "4")
    done = python(
        copy,
        "launch.py",
        "--steps",
        "4",
        "--json",
        "--events",
        "events.jsonl",
        "--standby",
        "0",
        "--logs",
        "logs",
    )
    assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss"] for line in run.stdout.splitlines()] for run in (plain, done)
    ]
    assert losses[0] == losses[1]
    assert "d1 was killed by signal 9 in step" in done.stderr
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    assert [e["device"] for e in events if e["event"] == "died"] == ["d1"]
    assert events[-1]["event"] == "finished"
    pids = [e["pid"] for e in events if e["event"] == "started"]
    assert len(pids) == 3
    assert not any(map(is_running, pids))


@pytest.mark.nightly
def test_paths_are_those_of_the_folder_of_the_call(bundle: Path, tmp_path: Path) -> None:
    """They went into the bundle, whose folder its processes work in."""
    copy = copied(bundle, tmp_path)
    words = ("--steps", "1", "--save=saved", "--checkpoint-dir", "commits", "--report", "reports")
    done = python(tmp_path, str(copy / "launch.py"), *words)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [
        "d0.safetensors",
        "d1.safetensors",
    ]
    assert (tmp_path / "commits" / "commit-1.json").is_file()
    assert (tmp_path / "reports" / "d0.json").is_file()
    assert not any((copy / name).exists() for name in ("saved", "commits", "reports"))


@pytest.mark.nightly
def test_launch_py_says_what_cannot_go_on(bundle: Path, tmp_path: Path) -> None:
    copy = copied(bundle, tmp_path)
    edit(copy / "training.py", "rows[:, 1:].contiguous()", "rows.contiguous()")
    done = python(copy, "launch.py", "--steps", "2", "--standby", "0")
    assert done.returncode == 2
    assert "BX5204]: step 0: batch entry 'targets' is torch.int64[8, 6]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_hooks_are_called_where_they_stand(bundle: Path, tmp_path: Path) -> None:
    copy = copied(bundle, tmp_path)
    text = (copy / "train.py").read_text()
    assert "on_step_end=[],  # f(device, step)" in text
    (copy / "train.py").write_text(text.rpartition("if __name__")[0] + COUNTED)
    seen = python(copy, "train.py").stdout.splitlines()
    assert seen.count("('begin', 'd0')") == seen.count("('end', 'd1')") == 1
    sends = [line.replace("send", "recv") for line in seen if "send" in line]
    assert sorted(sends) == sorted(line for line in seen if "recv" in line)
    assert len(sends) > 8


@pytest.mark.nightly
def test_a_run_can_be_told_to_replace_processes(bundle: Path, tmp_path: Path) -> None:
    copy = copied(bundle, tmp_path)
    kill_once(copy)
    edit(copy / "train.py", "from pathlib", "import os\nfrom pathlib")
    done = run(copy, RunOptions(4, spares=0, events=tmp_path / "events.jsonl"))
    assert [line.step for line in done.steps] == [0, 1, 2, 3]
    assert done.restarts == 1
    assert '"event": "died"' in (tmp_path / "events.jsonl").read_text()


@pytest.mark.nightly
def test_a_bundle_that_knows_fewer_orders_runs(bundle: Path, tmp_path: Path) -> None:
    """One of an earlier version: the supervisor that is installed here has learnt since."""
    copy = copied(bundle, tmp_path)
    kill_once(copy)
    edit(copy / "train.py", "from pathlib", "import os\nfrom pathlib")
    edit(copy / "runtime" / "control.py", "def _do_forget", "def _forget")
    edit(copy / "runtime" / "member.py", ", **about)", ")")
    edit(copy / "runtime" / "control.py", "self.log_bytes = log_limit()", "self.log_bytes = None")
    (copy / "runtime" / "finite.py").rename(copy / "runtime" / "numbers.py")
    for path in (copy / "runtime").glob("*.py"):
        path.write_text(path.read_text().replace("from .finite ", "from .numbers "))
    edit(copy / "runtime" / "train.py", '    on_nan: str = "stop",\n', "")
    edit(copy / "runtime" / "train.py", "device.on_nan = on_nan", 'device.on_nan = "ignore"')
    events = list[Event]()
    options = RunOptions(7, spares=1, commits=tmp_path / "commits", commit_every=1)
    done = run(copy, options, on_event=events.append)
    assert len(done.steps) == 7  # more commits than the board keeps
    assert [event["device"] for event in events if event["event"] == "died"] == ["d1"]
    verify(bundle_without_hook(copy)).require_passed()


def bundle_without_hook(folder: Path) -> Path:
    """Verify runs a bundle without a supervisor: nobody may end its processes."""
    (folder / "killed").touch()
    return folder


@pytest.mark.nightly
def test_a_log_that_is_too_large_costs_a_step_back_of_all(bundle: Path, tmp_path: Path) -> None:
    """Nothing is kept of what was sent: the death of one takes both back; the numbers stay."""
    copy, events = copied(bundle, tmp_path), list[Event]()
    kill_once(copy)
    edit(copy / "train.py", "from pathlib", "import os\nfrom pathlib")
    plain = python(bundle, "train.py", "--in-process", "--json", "--steps", "5")
    options = RunOptions(5, spares=0, log_mib=0, snapshot_every=2)
    done = run(copy, options, on_event=events.append)
    losses = [json.loads(line)["loss"] for line in plain.stdout.splitlines()]
    assert [line.loss for line in done.steps] == losses
    assert [e["step"] for e in events if e["event"] == "rolled_back"] == [2]
    assert {e["device"] for e in events if e["event"] == "log_dropped"} <= {"d0", "d1"}
    assert len([e for e in events if e["event"] == "assigned"]) == 2


HOSTS = ("alpha", "beta")


@pytest.mark.nightly
def test_two_hosts_as_their_users_start_them(tmp_path: Path) -> None:
    """launch.py twice, here both on this machine; a process of the second one is replaced."""
    bundle = split_small(tmp_path, cluster(2, HOSTS), extras=("hosts",))
    kill_once(bundle)
    edit(bundle / "train.py", "from pathlib", "import os\nfrom pathlib")
    secret, address = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    make(secret)
    common = ["--secret", str(secret), "--standby", "0"]
    head = start(bundle, "launch.py", "--listen", address, *common, "--json", "--steps", "4")
    agent = start(bundle, "launch.py", "--join", address, "--host", "beta", *common)
    try:
        out, said = head.communicate(timeout=DEADLINE_S)
        _, agent_said = agent.communicate(timeout=DEADLINE_S)
    finally:
        for process in (head, agent):
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert (head.returncode, agent.returncode) == (0, 0), said + agent_said
    (bundle / "killed").touch()
    plain = python(bundle, "train.py", "--in-process", "--json", "--steps", "4")
    losses = [
        [json.loads(line)["loss"] for line in text.splitlines()] for text in (plain.stdout, out)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert "d1 was killed by signal 9" in said


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.nightly
def test_a_limit_on_the_size_of_files_is_named_with_what_to_do(tmp_path: Path) -> None:
    """`ulimit -f` is for memory files, too: no room for snapshots, none for logs and commits.

    Python itself would cut the bytecode that it writes, and fail to read it.
    """
    bundle = split_small(tmp_path)
    words = ("launch.py", "--steps", "6", "--standby", "0", "--checkpoint-dir", "../commits")
    limited = 'ulimit -f 8; exec "$0" "$@"'
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        ["sh", "-c", limited, sys.executable, *words, "--events", "../events"],
        cwd=bundle,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2, done.stderr
    assert "raise the limit (`ulimit -f unlimited`)" in done.stderr
    assert "Traceback" not in done.stderr
