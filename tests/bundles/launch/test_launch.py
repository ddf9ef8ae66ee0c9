"""Running a bundle on this host: what is reported, what failures say, and that nothing is left."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bigbrain_fx.bundles.elastic import run_elastic
from bigbrain_fx.bundles.launch import (
    Command,
    Process,
    RunError,
    RunOptions,
    StepLine,
    can_supervise,
    commands,
    hosts,
    popen,
    run,
)
from bigbrain_fx.bundles.launch.failures import LogWarnings, failure
from bigbrain_fx.bundles.launch.process import users_environment
from bigbrain_fx.bundles.launch.program import allocated, peaks
from bigbrain_fx.bundles.launch.running import require_stores
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, read_plan
from tests.support import warm
from tests.support.bundles import cluster, copied, edit, is_running, split_small
from tests.support.command_line import call

DEADLINE_S = 60.0
QUICK = RunOptions(steps=2, deadline_s=DEADLINE_S)
ROOT = Path(__file__).resolve().parents[3]
READS = """
    import argparse
    import elsewhere
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    print(elsewhere.WORD, parser.parse_args().steps)
"""
LEAVE_PID = "\nimport os\nPath(os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\n"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("launch"))


@pytest.fixture
def marked(bundle: Path, tmp_path: Path) -> Path:
    """A copy whose processes leave their ids in it."""
    copy = copied(bundle, tmp_path)
    edit(copy / "train.py", "import device_d0", LEAVE_PID + "import device_d0")
    return copy


def pids(folder: Path) -> list[int]:
    found = [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]
    assert found, "no process was started"
    return found


@pytest.mark.nightly
@pytest.mark.usefixtures("cold")
def test_a_run_reports_every_step(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user's own code prints is no step; it finds its modules, and none of our words."""
    bundle = copied(bundle, tmp_path)
    edit(bundle / "training.py", "    for step in", f"{READS}    for step in")
    (tmp_path / "elsewhere.py").write_text('WORD = "loading"')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: list[StepLine] = []
    options = RunOptions(3, deadline_s=DEADLINE_S, save=tmp_path / "out", logs=tmp_path / "logs")
    done = run(bundle, options, seen.append)
    assert [line.step for line in done.steps] == [0, 1, 2]
    assert tuple(seen) == done.steps
    assert all(line.step_s > 0 for line in done.steps)
    assert done.max_rss_bytes.keys() == {"d0", "d1"}
    assert min(done.max_rss_bytes.values()) > 50 * 2**20  # torch alone
    assert done.max_allocated_bytes == {}  # no GPU computed
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "d0.safetensors",
        "d1.safetensors",
    ]
    assert [line.loss for line in done.steps] == in_process_losses(bundle, 3)


def in_process_losses(bundle: Path, steps: int) -> list[float]:
    words = ["train.py", "--in-process", "--json", "--steps", str(steps)]
    done = warm.run(
        [sys.executable, *words],
        cwd=bundle,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()[2:]]


def test_the_users_modules_are_found_and_ours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(ROOT), "/theirs", "lib"]))
    monkeypatch.setenv("RANK", "3")
    found = users_environment("RANK")
    assert found["PYTHONPATH"] == os.pathsep.join(["/theirs", os.path.abspath("lib")])
    assert "RANK" not in found
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "PYTHONPATH" not in users_environment()


@pytest.mark.parametrize(
    ("last", "advice"),
    [
        ("FileNotFoundError: [Errno 2] No such file: '/b/data.pt'", "copy the file"),
        ("ModuleNotFoundError: No module named 'mine'", "PYTHONPATH"),
        ("ModuleNotFoundError: No module named 'device_d1'", "copy the bundle again"),
        ("ModuleNotFoundError: No module named 'training'", "copy the bundle again"),
        ("error[BX5145]: cannot save in x: Read-only file system", "last line"),
        ("ModuleNotFoundError: No module named 'runtime.replay'", "copy the bundle again"),
        ("ValueError: no", "python train.py --in-process"),
    ],
)
def test_a_missing_file_of_a_bundle_is_named(last: str, advice: str, tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    log.write_text(f"Traceback (most recent call last):\n{last}\n")
    assert advice in (failure("d0 ended", 1, log, "train.py").help or "")


def test_data_that_end_early_are_no_wrong_batch(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    said = "batches(seed) ended before step 3; yield one batch per step"
    log.write_text(f"error[BX5025]: {said}\n")
    found = failure("d0 ended", 2, log, "train.py")
    assert (found.exit_code, found.code, found.what) == (2, "BX5025", said)
    log.write_text(f"error: {said}\n")  # of an older bundle
    older = failure("d0 ended", 2, log, "train.py")
    assert (older.exit_code, older.code, older.what) == (2, "BX3049", said)
    assert "--steps" in (found.help or "")
    assert "like example_batch" not in (found.help or "")


def test_an_unwritable_log_leaves_the_last_words_of_the_process(tmp_path: Path) -> None:
    """On a full disk a log is empty, and the reason was in it."""
    (tmp_path / "d0.log").touch()
    found = failure("d0 ended", 2, tmp_path / "d0.log", "train.py", text="commits: no space left")
    assert "commits: no space left" in str(found)


def test_a_host_that_gives_no_process_is_named(tmp_path: Path) -> None:
    found = failure("d0", 1, tmp_path / "no.log", "train.py", "Too many open files", is_short=True)
    assert "ulimit -n" in (found.help or "")


def test_a_process_that_said_why_and_was_killed_is_no_question_of_memory(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    log.write_text("error[BX5902]: can't start new thread: raise the limit (`ulimit -u`)\n")
    assert "last line" in (failure("d0 was killed", -9, log, "train.py").help or "")
    log.write_text("step 3\n")
    assert "dmesg" in (failure("d0 was killed", -9, log, "train.py").help or "")


HEARS_OF_IT = "import sys; sys.exit(75)"
CAUSES_IT = """
import os, sys, time
until = time.monotonic() + 60
while os.path.exists(f"/proc/{sys.argv[1]}"):  # until the launcher has seen the other's end
    assert time.monotonic() < until
    time.sleep(0.01)
raise ZeroDivisionError("on purpose")
"""


def test_a_process_that_ended_after_its_peer_is_not_named(bundle: Path) -> None:
    started: dict[str, Process] = {}

    def spawn(command: Command) -> Process:
        script = CAUSES_IT if started else HEARS_OF_IT
        pid = str(getattr(started.get("d0"), "pid", ""))
        words = (sys.executable, "-c", script, pid)
        started[command.device] = popen(replace(command, words=words))
        return started[command.device]

    with pytest.raises(RunError, match="the process of device d1 ended with exit code 1"):
        run(bundle, QUICK, spawn=spawn)


def test_a_killed_process_is_named_by_its_signal(marked: Path) -> None:
    line = "    def step_once(self) -> None:\n"
    edit(
        marked / "device_d0.py",
        line,
        line + "        __import__('os').kill(__import__('os').getpid(), 9)\n",
    )
    with pytest.raises(RunError, match="the process of device d0 was killed by signal 9") as caught:
        run(marked, QUICK)
    assert "when memory runs out" in str(caught.value.help)
    assert not any(map(is_running, pids(marked)))


def test_users_output_may_be_bytes_and_users_processes_end(marked: Path) -> None:
    prints = """
import subprocess, sys
Path("child.pid").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
sys.stdout.buffer.write(b"\\xff\\n")
"""
    path = marked / "device_d1.py"
    path.write_text(path.read_text() + prints.replace("Path(", "__import__('pathlib').Path("))
    assert len(run(marked, QUICK).steps) == 2
    assert not is_running(int((marked / "child.pid").read_text()))


def test_of_commits_missed_in_a_row_the_first_is_told(tmp_path: Path) -> None:
    log, heard = tmp_path / "d0.log", list[str]()
    warnings = LogWarnings(log, "d0", heard.append)
    warnings.look()  # there is no log yet
    misses = [{"event": "missed", "step": n, "text": "full", "row": n, "newest": 0} for n in (1, 2)]
    events = [*misses, {"event": "committed_again", "step": 3, "missed": 2}, {"event": "mine"}]
    with log.open("w") as file:
        for event in events:
            file.write(f"d1: WARNING: not its own\nWARNING: a user's\n{json.dumps(event)}")
            file.flush()
            warnings.look()  # its line is not whole yet
            file.write("\n")
            file.flush()
            warnings.look()
        file.write("d0: WARNING: no commit at step 4: in the words of an older bundle\n")
        file.flush()
        warnings.look()
    assert heard == [
        "WARNING: no checkpoint at step 1: full; training goes on, and the newest checkpoint is of "
        "step 0",
        "checkpoints are written again: step 3, after 2 were missed",
        "WARNING: no commit at step 4: in the words of an older bundle",
    ]


def test_processes_of_another_plan_are_refused(marked: Path) -> None:
    plan = read_plan(marked).key
    edit(
        marked / "train.py",
        f'plan="{plan}"',
        'plan="0000" if os.environ["RANK"] == "1" else "1111"',
    )
    with pytest.raises(RunError) as found:
        run(marked, QUICK)
    assert "copy one bundle to all hosts" in "\n".join(found.value.notes)


def test_a_port_in_use_is_refused(bundle: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} is in use"):
            run(bundle, RunOptions(steps=1, port=port))


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_out_of_range_is_refused(bundle: Path, port: int) -> None:
    with pytest.raises(InputError, match=f"port {port} is not between 1 and 65535"):
        run(bundle, RunOptions(steps=1, port=port))


def test_a_folder_that_is_no_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*plan.json"):
        run(tmp_path, RunOptions())
    (tmp_path / "plan.json").write_bytes((bundle / "plan.json").read_bytes())
    with pytest.raises(InputError, match=r"it has no train\.py"):
        run(tmp_path, RunOptions())


@pytest.mark.parametrize(
    ("spoil", "said", "at"),
    [
        (lambda file: file.write_text("x = 1 +"), "device_d1.py cannot be imported", "d1.py:1"),
        (lambda file: file.write_bytes(b"\0"), "device_d1.py cannot be imported", "device_d1.py"),
    ],
)
def test_a_spoiled_program_is_refused_before_a_process_starts(
    bundle: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str, at: str
) -> None:
    copy = copied(bundle, tmp_path)
    spoil(copy / "device_d1.py")
    with pytest.raises(InputError, match=said) as caught:
        run(copy, RunOptions(1, logs=tmp_path / "logs"))
    assert at in str(caught.value.at)
    assert not (tmp_path / "logs").exists()


@pytest.mark.nightly
def test_commands_for_several_hosts(tmp_path: Path) -> None:
    plan = read_plan(split_small(tmp_path, cluster(3, hosts=("north", "south"))))
    assert hosts(plan) == ("north", "south")
    common = "WORLD_SIZE=3 MASTER_ADDR=north MASTER_PORT=29500 python train.py --steps 7"
    assert [(host, command) for host, command in commands(plan, RunOptions(7))] == [
        ("north", f"RANK=0 LOCAL_RANK=0 {common}"),
        ("south", f"RANK=1 LOCAL_RANK=0 {common}"),
        ("north", f"RANK=2 LOCAL_RANK=1 {common}"),
    ]
    secret = "--secret secret --spares 2"  # earlier name: bundles of 0.2 know no other
    (north, head), (south, agent) = commands(plan, RunOptions(7, spares=2, commits=Path("my c")))
    assert (north, south) == ("north", "south")
    assert head.startswith(f"python launch.py --listen north:29500 {secret} --restarts 20")
    assert head.endswith("--steps 7 --commits 'my c'")  # earlier name
    assert agent == f"python launch.py --join north:29500 --host south {secret}"
    moved = commands(plan, RunOptions(7, seed=3, port=4000, save=Path("my out")))
    assert "MASTER_PORT=4000 python train.py --steps 7 --seed 3" in moved[1][1]
    assert moved[1][1].endswith("--save 'my out'")


def test_a_run_tells_what_tensors_took_of_each_gpu(bundle: Path, tmp_path: Path) -> None:
    reports = {"d0": {"max_rss_bytes": 5}, "d1": {"max_rss_bytes": 6, "max_allocated_bytes": 7}}
    for name, facts in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": name, **facts}))
    assert allocated(read_plan(bundle), tmp_path) == {"d1": 7}
    assert peaks(read_plan(bundle), tmp_path) == {"d0": 5, "d1": 6}


# --------------------------------------------------------------------------- over nccl


@pytest.fixture
def of_gpus(bundle: Path, tmp_path: Path) -> Path:
    """A copy whose plan says that all its devices are GPUs."""
    copy = copied(bundle, tmp_path)
    text = (copy / "plan.json").read_text()
    (copy / "plan.json").write_text(text.replace('"kind":"cpu"', '"kind":"cuda"'))
    return copy


@pytest.mark.parametrize("start", [run, run_elastic, lambda b, o: commands(read_plan(b), o)])
def test_no_process_is_replaced_over_nccl(
    of_gpus: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised run would go over gloo, which is not what the plan foretells."""
    monkeypatch.setattr("bigbrain_fx.bundles.launch.running.require_gpus", lambda _: None)
    assert not can_supervise(read_plan(of_gpus))
    with pytest.raises(InputError, match=r"all its devices are GPUs.* over nccl") as caught:
        start(of_gpus, RunOptions(steps=1, spares=1))
    assert "leave --standby and --elastic out" in str(caught.value.help)
    assert "add --backend gloo" in str(caught.value.help)
    assert can_supervise(read_plan(of_gpus), "gloo")


def test_programs_get_the_transport(of_gpus: Path) -> None:
    plan = read_plan(of_gpus)
    told = [command for _, command in commands(plan, RunOptions(steps=1, backend="gloo"))]
    assert told
    assert all("--transport gloo" in command for command in told)
    assert not any("--transport" in c for _, c in commands(plan, RunOptions(steps=1)))


def test_nccl_is_for_gpus(bundle: Path) -> None:
    with pytest.raises(
        InputError, match="nccl goes between GPUs, and d0, d1 of this plan are none"
    ):
        run(bundle, RunOptions(steps=1, backend="nccl"))
    with pytest.raises(InputError, match="expected 'gloo' or 'nccl'"):
        run(bundle, RunOptions(steps=1, backend="ucx"))  # type: ignore[arg-type]


def test_elastic_over_nccl_is_refused_for_its_own_reason(of_gpus: Path) -> None:
    for words in ((), ("--no-replay",), ("--standby", "0")):
        done = call("run", of_gpus, "--elastic", *words)
        assert done.code == 2
        assert "no process of this plan can be replaced" in done.err
        assert "leave --no-replay out" not in done.err
    assert call("run", of_gpus, "--standby", "1").code == 2


def test_a_folder_of_an_offload_target_must_be_there(tmp_path: Path) -> None:
    store = SimpleNamespace(name="disk0", folder=str(tmp_path / "scratch"))
    cluster, stages = SimpleNamespace(store={"d0": store}), SimpleNamespace(devices=("d0", "d1"))
    plan = cast("Plan", SimpleNamespace(cluster=cluster, stages=stages))
    with pytest.raises(InputError, match="no folder here") as caught:
        require_stores(plan)
    assert caught.value.code == "BX3064a"
    assert f"mkdir -p {store.folder}" in str(caught.value.help)
    (tmp_path / "scratch").mkdir()
    require_stores(plan)
