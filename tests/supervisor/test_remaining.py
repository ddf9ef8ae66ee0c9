"""What an agent does for its devices when the supervisor that decides is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.runtime.checkpoint_store import ASIDE, CheckpointStore
from bigbrain_fx.supervisor.pipe import Orders, line_pair
from bigbrain_fx.supervisor.remaining import Remaining, said_of
from bigbrain_fx.supervisor.secured import Mouth, Secured, SilentError
from tests.supervisor.test_peer_states import plain, split
from tests.support.certificates import make, pair
from tests.support.commit_disks import steps_in

LIMIT_S = 30.0
PLACES = (("south", ("d2", "d3")),)


class Device:
    """A device's process: the words that an agent passes on, and the orders that it is given."""

    def __init__(self, remaining: Remaining, orders: dict[int, Orders], number: int) -> None:
        self.remaining, self.number = remaining, number
        ours, self.line = line_pair()
        orders[number] = Orders(ours)

    def says(self, say: str, **facts: object) -> None:
        self.remaining.pass_word(self.number, json.dumps({"say": say, **facts}).encode())

    def is_told(self, do: str, **facts: object) -> None:
        self.remaining.pass_order(self.number, {"do": do, **facts})

    def orders(self) -> list[dict[str, Any]]:
        found = []
        while True:
            try:
                found.append(json.loads(self.line.recv(1 << 16, socket.MSG_DONTWAIT)))
            except BlockingIOError:
                return found


@pytest.fixture
def devices() -> Iterator[list[Device]]:
    """Two devices of the host south, at work."""
    orders: dict[int, Orders] = {}
    remaining = Remaining("south", PLACES, orders)
    made = [Device(remaining, orders, number) for number in range(2)]
    for device, name in zip(made, ("d2", "d3"), strict=True):
        device.says("hello", pid=1, plan="x", knows=["last_commit"])
        device.is_told("be", device=name)
    yield made
    for device in made:
        device.line.close()
        orders[device.number].line.close()


def test_a_message_to_one_device_reaches_all(devices: list[Device]) -> None:
    one, other = devices
    one.is_told("voted", step=7, yes=True)  # and then the connection ended
    assert one.remaining.begin(is_gone=True)
    for device in (one, other):
        voted, last = device.orders()
        assert voted == {"do": "voted", "step": 7, "yes": True}
        assert (last["do"], last["here"], last["is_gone"]) == ("last_commit", ["d2", "d3"], True)


def test_questions_without_an_answer_of_the_head_are_answered(devices: list[Device]) -> None:
    one, other = devices
    one.says("first", what="the batch of step 3", text="d2 aa")
    one.is_told("first", what="the batch of step 3", text="d0 bb")  # another host's was the first
    other.says("first", what="the batch of step 3", text="d3 aa")
    one.says("first", what="copies", text="d2 cc")
    one.remaining.begin(is_gone=True)
    other.says("first", what="copies", text="d3 dd")  # asked when nobody is there any more
    answers = [(o["what"], o["text"]) for o in (*one.orders(), *other.orders()) if "what" in o]
    batch = "the batch of step 3"
    assert answers == [("copies", "d2 cc"), (batch, "d0 bb"), ("copies", "d2 cc")]


def test_notes_reach_all_and_what_was_kept_is_known(devices: list[Device]) -> None:
    one, other = devices
    one.is_told("post", key="kept", text='["commit-8-g1", "commit-4-g1"]')
    one.remaining.begin(is_gone=False)
    other.orders()
    one.says("post", key="last/d2", text="{}")
    assert other.orders() == [{"do": "post", "key": "last/d2", "text": "{}"}]
    assert not one.remaining.is_over
    one.says("kept", step=9, file=f"/c/commit-9.json{ASIDE}")
    other.says("kept")
    assert one.remaining.is_over
    said = said_of(one.remaining, is_gone=False)
    assert "step 9 (the one before was of step 8), is set aside" in said
    assert f"mv /c/commit-9.json{ASIDE} /c/commit-9.json" in said


def test_a_device_that_ends_is_not_waited_for(devices: list[Device]) -> None:
    one, other = devices
    one.remaining.begin(is_gone=True)
    one.says("kept", text="no replica is whole on this host")
    assert not one.remaining.is_over
    one.remaining.end(other.number)
    assert one.remaining.is_over
    assert "nothing was committed since (no replica is whole" in said_of(
        one.remaining, is_gone=True
    )


def test_an_older_bundle_is_not_asked(devices: list[Device]) -> None:
    one, other = devices
    one.remaining.able.discard(other.number)
    assert not one.remaining.begin(is_gone=True)
    assert not other.orders()
    assert "older than last checkpoints" in said_of(one.remaining, is_gone=True)


# --------------------------------------------------------------------------- how a line ends


@contextmanager
def two_ends() -> Iterator[tuple[Secured, Secured]]:
    own = pair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[Secured] = []

        def answer() -> None:
            found.append(Secured(listener.accept()[0], own, is_head=True))

        thread = threading.Thread(target=answer)
        thread.start()
        agent = Secured(socket.create_connection(listener.getsockname()), own, is_head=False)
        thread.join(LIMIT_S)
        yield found[0], agent
    for end in (found[0], agent):
        end.dispose()


def test_a_living_end_whose_last_word_does_not_leave_does_not_look_like_a_dead_one() -> None:
    with two_ends() as (head, agent):
        head.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        mouth = Mouth(head)
        for _ in range(100):
            mouth.say({"padding": "x" * (1 << 18)})  # nobody reads
        mouth.close(0.2)
        head.close()
        head.connection.close()  # as at the end of its process
        assert how_it_ends(agent) is not None
        assert not agent.is_gone()  # its port takes calls


def how_it_ends(end: Secured) -> OSError | None:
    try:
        while end.hear() is not None:
            pass
    except OSError as error:
        return error
    return None


def test_an_end_in_order_is_one() -> None:
    with two_ends() as (head, agent):
        head.close()
        assert how_it_ends(agent) is None


def test_a_device_without_a_listener_has_heard_no_end() -> None:
    with two_ends() as (_, agent):
        agent.break_off("it takes no more")
        with pytest.raises(SilentError, match="takes no more"):
            agent.hear()


# --------------------------------------------------------------------------- two hosts


STEPS = 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_the_other_host_commits_when_the_listening_one_is_lost(
    tmp_path: Path, blow: signal.Signals
) -> None:
    """It is as if nothing had happened: the run goes on from there with the same bits."""
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), extras=("hosts",))
    launch, commits = bundle / "launch.py", tmp_path / "commits"
    own = launch.read_text()
    assert ', "train.py", replicas=True)' in own
    hosts = ', "train.py", ("north", "north", "south", "south")'
    launch.write_text(own.replace(', "train.py"', hosts))
    secret = make(tmp_path / "secret")
    with running(bundle, secret, commits) as (head, agent):
        assert head.stdout is not None
        while json.loads(head.stdout.readline())["step"] < 2:
            pass
        os.kill(head.pid, blow)
        said, _ = agent.communicate(timeout=4 * LIMIT_S)
    assert agent.returncode == 1
    aside = [*commits.glob(f"*{ASIDE}")]
    assert len(aside) == (blow == signal.SIGSTOP), said
    counted = steps_in(commits)
    assert (counted == [0]) == bool(aside)  # no later run begins with what is set aside
    for path in aside:
        assert f"mv {path} {str(path).removesuffix(ASIDE)}" in said
        path.rename(str(path).removesuffix(ASIDE))
    newest = CheckpointStore(commits).records()[0]
    assert newest.step >= 2  # the head has ended step 2; the other may be before its update
    assert f"{commits}/commit-{newest.step}.json" in said
    launch.write_text(own)
    again = ("--resume", "--steps", str(STEPS), "--save", str(tmp_path / "out"))
    words = [
        sys.executable,
        "launch.py",
        "--checkpoint-dir",
        str(commits),
        *again,
        "--standby",
        "0",
    ]
    subprocess.run(words, cwd=bundle, check=True, capture_output=True, env=environment())
    _, expected = plain(bundle, STEPS)
    for name in ("d0", "d1", "d2", "d3"):
        found = load_file(tmp_path / "out" / f"{name}.safetensors")
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


@contextmanager
def running(
    bundle: Path, secret: Path, commits: Path
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A run without an end over two supervisors on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    common = ("--secret", str(secret), "--standby", "0", "--hang", "4")
    ours = (
        "--checkpoint-dir",
        str(commits),
        "--checkpoint-every",
        "1000",
        "--steps",
        "100000",
        "--json",
    )
    head = start(bundle, "--listen", place, *common, *ours)
    agent = start(bundle, "--join", place, "--host", "south", *common)
    try:
        yield head, agent
    finally:
        for process in (head, agent):
            process.kill()
            process.wait(LIMIT_S)
            assert process.stdout is not None
            process.stdout.close()


def start(bundle: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch.py", *words],
        cwd=bundle,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**own, "OMP_NUM_THREADS": "1"}
