"""Messages between real processes over gloo on the loopback; every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm import Popen

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0  # for a whole scenario, imports of torch included

PROGRAM = '''
"""One of two processes: `program.py SCENARIO RANK FOLDER DEADLINE`; writes what it saw as JSON."""
import json, os, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from bigbrain_fx.runtime.compared_stream import Subject
from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.network import NetworkTransport

scenario, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
deadline_s = float(sys.argv[4])
store = dist.FileStore(str(folder / "store"), 2)
store.set_timeout(timedelta(seconds=30))
limit = timedelta(seconds=30)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
transport = NetworkTransport({"a": 0, "b": 1}, torch.device("cpu"), deadline_s, store)


def channel(tag, value, shape=(2, 3)):
    return Channel(tag, "activation", value, 0, 1, "a", "b", shape, torch.float32)


ONE, TWO, BIG = channel(0, "one"), channel(1, "two"), channel(2, "big", (4_000_000,))


def numbered(i):
    return torch.full((3, 2), float(i)).t()


def order_a():
    for step in range(2):
        for i in range(4):
            transport.send(ONE, numbered(4 * step + i))
            transport.send(TWO, -numbered(4 * step + i))
        transport.finish()


def order_b():
    seen = {"one": [], "two": [], "strides": []}
    for step in range(2):
        transport.begin_step(((ONE, 4), (TWO, 4)))
        for name, line in (("two", TWO), ("one", ONE)):  # not in the order of sending
            for i in range(4):
                got = transport.recv(line)
                seen[name].append(got[0, 0].item())
                seen["strides"].append(got.stride())
    return seen


def ahead_a():
    transport.send(ONE, numbered(0))
    transport.finish()
    store.wait(["posted"])
    transport.send(ONE, numbered(1))
    transport.send(ONE, numbered(2))
    transport.finish()  # waits until both have arrived
    store.set("arrived", "1")


def ahead_b():
    transport.begin_step(((ONE, 1),))
    transport.recv(ONE)
    transport.begin_step(((ONE, 2),))
    store.set("posted", "1")
    store.wait(["arrived"])  # nobody has asked for a message yet
    return [transport.recv(ONE)[0, 0].item() for _ in range(2)]


def silent_a():
    store.wait(["given up"])


def silent_b():
    transport.begin_step(((ONE, 1),))
    try:
        return failure(lambda: transport.recv(ONE))
    finally:
        store.set("given up", "1")


def dies_a():
    transport.send(ONE, numbered(0))
    transport.finish()
    os._exit(7)


def dies_b():
    transport.begin_step(((ONE, 2),))
    transport.recv(ONE)
    return failure(lambda: transport.recv(ONE))


def deaf_a():
    transport.send(BIG, torch.zeros(4_000_000))
    return failure(transport.finish)


def deaf_b():
    store.wait(["seen/0"])


def shape_a():
    transport.send(ONE, torch.zeros(3, 3))


def shape_b():
    transport.begin_step(((ONE, 1),))
    return failure(lambda: transport.recv(ONE))


def surplus_a():
    pass


def surplus_b():
    transport.begin_step(())
    return failure(lambda: transport.recv(ONE))


def agree_a():
    transport.agree(Subject(0), "1234", "a")
    store.set("agreed", "1")


def agree_b():
    store.wait(["agreed"])
    transport.agree(Subject(0), "1234", "b")
    return failure(lambda: transport.agree(Subject(0), "5678", "b"))


def failure(call):
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        seconds = time.monotonic() - start
        return {"error": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"error": None}


seen = globals()[f"{scenario}_{'ab'[rank]}"]()
(folder / f"{rank}.json").write_text(json.dumps(seen))
store.set(f"seen/{rank}", "1")
if scenario not in ("dies", "deaf"):
    store.wait(["seen/0", "seen/1"])  # nobody leaves while the other still listens
sys.stdout.flush()
os._exit(0)
'''


@contextlib.contextmanager
def two_processes(folder: Path, scenario: str, deadline_s: float) -> Iterator[list[Any]]:
    """Start both; end what is still there, by its id."""
    (folder / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    try:
        for rank in range(2):
            with (folder / f"{rank}.log").open("w") as log:
                words = ["program.py", scenario, str(rank), str(folder), str(deadline_s)]
                processes.append(
                    Popen(
                        [sys.executable, *words],
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def scenario(folder: Path, name: str, deadline_s: float = 20.0, expected: int = 0) -> list[Any]:
    """Run a scenario; return what each process saw, None for one that died."""
    until = time.monotonic() + LIMIT_S
    with two_processes(folder, name, deadline_s) as processes:
        codes = [process.wait(max(0.1, until - time.monotonic())) for process in processes]
    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(2))
    assert codes == [expected, 0], logs
    files = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_each_channel_keeps_its_order_and_its_strides(tmp_path: Path) -> None:
    seen = scenario(tmp_path, "order")[1]
    assert seen["one"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert seen["two"] == [0, -1, -2, -3, -4, -5, -6, -7]
    assert {tuple(strides) for strides in seen["strides"]} == {(1, 2)}


@pytest.mark.nightly
def test_receives_are_posted_before_anyone_asks(tmp_path: Path) -> None:
    assert scenario(tmp_path, "ahead")[1] == [1, 2]


ONE = "activation 'one' from stage 0 (a) to stage 1 (b)"
SAID: dict[str, tuple[dict[str, Any], int, str, tuple[str, ...]]] = {  # rank, error, text
    "silent": ({"deadline_s": 1.0}, 1, "LateMessageError", ("within 1 s", ONE)),
    "dies": (
        {"deadline_s": 20.0, "expected": 7},
        1,
        "PeerLostError",
        (f"the peer is gone: {ONE}",),
    ),
    "deaf": ({"deadline_s": 1.0}, 0, "PeerLostError", (ONE.replace("one", "big"),)),
    "shape": ({}, 1, "ValueError", ("planned shape (2, 3), sent (3, 3)",)),
    "agree": (
        {},
        1,
        "BatchError",
        ("the batch of step 0 differs between devices: a has 1234, b has 5678",),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_network_failures_are_named_in_time(tmp_path: Path, name: str) -> None:
    options, rank, error, texts = SAID[name]
    seen = scenario(tmp_path, name, **options)[rank]
    assert seen["error"] == error
    assert all(text in seen["text"] for text in texts), seen["text"]
    if name in ("silent", "dies", "deaf"):
        assert 0.9 * (name == "silent") < seen["seconds"] < 15


@pytest.mark.nightly
def test_a_message_that_is_not_due_is_not_waited_for(tmp_path: Path) -> None:
    seen = scenario(tmp_path, "surplus")[1]
    assert seen["text"].startswith("no message is due on activation 'one'")
    assert seen["seconds"] < 1


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No process of a scenario outlives it: the folder is in its command line."""
    yield
    left = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(tmp_path).encode() in entry.read_bytes():
                left.append(entry)
    assert left == []
