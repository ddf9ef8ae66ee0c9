"""`bigbrain-fx run`: ports, hosts, bad data, and what is left when it is stopped."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import Run
from bigbrain_fx.cli.running import interrupted
from tests.support.command_line import (
    CHOICES,
    MODEL,
    call,
    files,
    write_cluster,
    write_model,
)

ROOT = Path(__file__).resolve().parents[2]


# --------------------------------------------------------------------------- ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def test_a_port_in_use_is_named(bundle: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    done = call("run", bundle, "--port", str(port), "--steps", "1")
    assert done.code == 2
    assert done.err == f"error[BX3054]: port {port} is in use\n  help: give another port\n"


@pytest.mark.parametrize("port", ["70000", "-5"])
def test_a_port_out_of_range(bundle: Path, port: str) -> None:
    done = call("run", bundle, "--port", port)
    assert done.code == 2
    assert done.err.startswith(f"error[BX3053]: port {port} is not between 1 and 65535\n")


@pytest.mark.parametrize("words", [("--steps", "0"), ("--deadline", "0"), ("--port", "http")])
def test_bad_numbers(bundle: Path, words: tuple[str, str]) -> None:
    done = call("run", bundle, *words)
    assert done.code == 2
    assert f"Invalid value for '{words[0]}'" in done.err


def test_gpu_memory_of_tensors_is_printed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> Run:
        held = {"d0": 3 << 20, "d1": 5 << 20}
        return Run((), {"d0": 1 << 20}, Path("logs"), max_allocated_bytes=held)

    monkeypatch.setattr("bigbrain_fx.bundles.launch.run", run)
    done = call("run", bundle, "--steps", "1")
    assert done.out == (
        "no step was left to run: --steps counts those before the checkpoint, too\n"
        "GPU memory of tensors, peak: d0 3 MiB, d1 5 MiB\n"
        "resident memory, peak: d0 1 MiB\nlogs in logs\n"
    )


def test_a_plan_alone_cannot_be_run(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes((bundle / "plan.json").read_bytes())
    done = call("run", tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"error[BX3056]: {tmp_path} is not a bundle: it has no train.py\n")


# --------------------------------------------------------------------------- several hosts


def test_a_plan_for_two_hosts_prints_a_command_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    write_cluster(tmp_path, count=3, hosts=("node-1", "node-2"))
    made = call("split", "model.py", "--devices", "cluster.json", "--with", "hosts", *CHOICES)
    assert made.code == 0, made.err

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("bigbrain_fx.bundles.launch.running.popen", start)
    monkeypatch.setattr("bigbrain_fx.bundles.launch.supervised.start_supervised", start)
    done = call("run", "bundle", "--no-replay", "--steps", "7", "--port", "4000", "--seed", "3")
    rest = "MASTER_ADDR=node-1 MASTER_PORT=4000 python train.py --steps 7 --seed 3"
    assert done.code == 0
    assert done.out == (
        f"node-1$ RANK=0 LOCAL_RANK=0 WORLD_SIZE=3 {rest}\n"
        f"node-2$ RANK=1 LOCAL_RANK=0 WORLD_SIZE=3 {rest}\n"
        f"node-1$ RANK=2 LOCAL_RANK=1 WORLD_SIZE=3 {rest}\n"
    )
    for given in (["--background"], ["--metrics", 9], ["--validate", "a.py"], ["--log-every", 2]):
        refused = call("run", "bundle", *given)
        assert refused.code == 2
        assert f"{given[0]} is for a run on one host" in refused.err
    objects = call("run", "bundle", "--no-replay", "--json").objects
    assert [entry["host"] for entry in objects] == ["node-1", "node-2", "node-1"]
    assert " --steps 10" in objects[0]["command"]
    printed = call("run", "bundle", "--json")
    replaced = printed.objects
    assert "(umask 077; openssl req -x509 " in printed.err
    assert [entry["host"] for entry in replaced] == ["node-1", "node-2"]
    assert replaced[0]["command"].startswith("python launch.py --listen node-1:29500 ")


# --------------------------------------------------------------------------- data

_BATCHES = '''

def batches(seed):
    """Good at step 0; at step 1 as FAULT says."""
    import os
    print("batches may print, too")
    yield example_batch()
    batch, fault = example_batch(), os.environ.get("FAULT")  # none while it is split
    if fault == "type":
        batch["y"] = batch["y"].double()
    if fault == "rows":
        batch = {name: tensor[:4] for name, tensor in batch.items()}
    yield batch
    yield example_batch()
'''


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    model, cluster = write_model(folder, MODEL + _BATCHES), write_cluster(folder)
    made = call("split", model, "--devices", cluster, "--out", folder / "b", *CHOICES)
    assert made.code == 0, made.err
    assert "\noptimizer: torch's AdamW" in made.out  # what the file leaves open
    assert "\ndata: " not in made.out
    return folder / "b"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            "type",
            "step 1: batch entry 'y' is torch.float64[8, 8], the model takes torch.float32",
            marks=pytest.mark.nightly,
        ),
        ("rows", r"step 1: batch entry '[xy]' is torch.float32[4, 8], the model takes torch"),
    ],
)
def test_a_batch_unlike_the_example_is_named(
    faulty: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    done = call("run", faulty, "--steps", "3", "--json")
    assert done.code == 2
    # The device that makes the loss may be ended before it has told that of step 0.
    assert [line["step"] for line in done.objects] in ([], [0])
    pattern = r"error\[BX5204\]: " + re.escape(message).replace(r"\[xy\]", "[xy]")
    error = done.err[done.err.index("error[") :]
    assert re.match(pattern, error), done.err
    assert "help: every batch must be like example_batch()" in error
    assert "Traceback" not in error


# --------------------------------------------------------------------------- stopped


def _children(pid: int) -> set[int]:
    """Return the processes below one, by their ids."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            direct = {int(text) for text in (task / "children").read_text().split()}
        except OSError:  # it ended meanwhile
            continue
        found |= direct.union(*map(_children, direct))
    return found


def _still_there(children: Collection[int], timeout_s: float) -> set[int]:
    """Wait for the end of processes that are nobody's here; return those that outlive it."""
    left = {pid: pidfd for pid in children if (pidfd := _pidfd(pid)) is not None}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as ended:
        for pid, pidfd in left.items():
            ended.register(pidfd, selectors.EVENT_READ, pid)
        while left and (now := time.monotonic()) < deadline:
            for key, _ in ended.select(deadline - now):
                ended.unregister(key.fd)
                os.close(left.pop(key.data))
    return set(left)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)]
)
def test_stopping_a_run_leaves_no_process(
    bundle: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = files(bundle)
    words = ["run", str(bundle), "--steps", "1000000", "--json", "--logs", str(tmp_path / "logs")]
    with subprocess.Popen(
        [sys.executable, "-m", "bigbrain_fx", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background ignores SIGINT for all of them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                assert ready.select(timeout=60), "no step within a minute"
            assert process.stdout.readline().startswith('{"step": 0')
            children = _children(process.pid)
            assert len(children) >= 2
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the group we started
    assert process.returncode == code
    assert "Traceback" not in said
    assert not _still_there(children, 60)
    assert files(bundle) == before


@pytest.mark.nightly
def test_a_killed_device_is_an_error_that_shows_its_log(faulty: Path, tmp_path: Path) -> None:
    broken = tmp_path / "b"
    broken.mkdir()
    for name, content in files(faulty).items():
        (broken / name).parent.mkdir(exist_ok=True)
        if (faulty / name).is_file():
            (broken / name).write_bytes(content)
    (broken / "device_d1.py").write_text("raise MemoryError('no room left')\n")
    done = call("run", broken, "--steps", "1")
    assert done.code == 1
    # both processes import both device files: either may be the first to end
    assert re.search(
        r"^error\[BX3050\]: the process of device d[01] ended with exit code 1: it ended twice "
        r"before it had finished a step\n  at: ",
        done.err,
        re.MULTILINE,
    )
    assert "  note: MemoryError: no room left\n" in done.err
    assert "train.py --in-process" in done.err


def test_ctrl_c_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(KeyboardInterrupt), interrupted(folder):
            raise KeyboardInterrupt
    none, empty = capsys.readouterr().err.splitlines()
    assert none == "nothing of this run was saved; --checkpoint-dir FOLDER writes checkpoints"
    assert empty == f"nothing of this run was saved: {tmp_path} has no checkpoint"
