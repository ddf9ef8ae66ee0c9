"""What fails between a supervisor and its processes: long orders, nonsense, groups, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigbrain_fx.bundles.launch import start_supervised
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.control import Control
from bigbrain_fx.supervisor import (
    DeviceProcess,
    FailedError,
    Order,
    Supervisor,
    popen,
    processes as starting,
)
from bigbrain_fx.supervisor.console import hold_streams
from bigbrain_fx.supervisor.hosts import Agent, Bridge, admit
from bigbrain_fx.supervisor.pipe import PART, Ears, Orders, line_pair
from bigbrain_fx.supervisor.remaining import Remaining
from bigbrain_fx.supervisor.secured import Secured
from tests.support.bundles import cluster, is_running, split_small
from tests.support.certificates import pair
from tests.support.puppets import Puppet, stage
from tests.support.replayed import Fault, supervised

LIMIT_S = 20.0


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


# --------------------------------------------------------------------------- long orders


@pytest.mark.gate("10", "32768", "98304")
@pytest.mark.parametrize("length", [10, PART, 3 * PART, 3_000_000])
def test_orders_and_words_of_any_length_arrive(length: int) -> None:
    """Also where the kernel takes less in one packet: it is told to."""
    ours, theirs = line_pair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PART)
    control, orders, ears = Control(theirs, 1.0), Orders(ours), Ears(ours)
    orders.takes_parts = True
    orders.give("first", what="x", text="a\\" * (length // 2))
    orders.give("epoch", step=7)
    while control.epoch != 7:
        control._take_order()
        orders.pass_on()
    assert control.said_first["x"] == "a\\" * (length // 2)
    talker = threading.Thread(target=control.say, args=("post",), kwargs={"text": "é\n" * length})
    talker.start()
    heard = None
    while heard is None:
        try:
            heard = ears.hear()
        except BlockingIOError:
            time.sleep(0.001)
    talker.join(LIMIT_S)
    assert heard == {"say": "post", "text": "é\n" * length}
    ours.close()
    theirs.close()


def test_an_order_that_cannot_be_given_is_no_secret() -> None:
    """An older bundle's process knows no parts."""
    ours, theirs = line_pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
    orders = Orders(ours)
    orders.give("first", what="x", text="a" * 500_000)
    assert "an order of 5000" in str(orders.refused)
    assert "Message too long" in str(orders.refused)
    ours.close()
    theirs.close()


def test_a_process_that_cannot_be_told_is_ended_with_the_reason(tmp_path: Path) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        member = next(m for m in seen.supervisor.crew.members if m.device == "d1")
        member.orders.takes_parts = False
        member.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
        seen.puppets[0].say("post", key="k", text="a" * 500_000)
        seen.turn_until(lambda: bool(seen.of("died")))
        assert "Message too long" in seen.of("died")[0]["text"]


NO_MEMORY = [errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS]


@pytest.mark.parametrize("number", NO_MEMORY)
def test_an_order_waits_while_the_kernel_has_no_memory(number: int) -> None:
    class Short:
        """A socket whose first call fails."""

        calls = 0

        def sendmsg(self, *_: object) -> None:
            self.calls += 1
            if self.calls == 1:
                raise OSError(number, os.strerror(number))

    line = Short()
    orders = Orders(line)  # type: ignore[arg-type]
    orders.give("epoch", step=7)
    assert orders.waiting
    assert orders.refused is None
    orders.pass_on()
    assert not orders.waiting


# --------------------------------------------------------------------------- nonsense


NONSENSE = [
    b"[" * 100_000,
    b"not json",
    b"[]",
    b'{"say": "unheard of"}',
    b'{"say": "step", "what": 1}',
    b'{"say": "part", "text": 3}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("packet", NONSENSE, ids=range(len(NONSENSE)))
def test_a_process_that_says_nonsense_is_replaced(tmp_path: Path, packet: bytes) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        seen.puppets[1].line.send(packet)
        seen.turn_until(lambda: len(seen.puppets) == 3)
        assert "its line to the supervisor failed" in seen.of("died")[0]["text"]
        assert not seen.puppets[0].process.ended.is_set()


# --------------------------------------------------------------------------- groups


FAMILY = "sleep 1000 & echo $! > {file}.part; mv {file}.part {file}; {then}"


@pytest.mark.parametrize("then", ["sleep 1000", "true", "kill -STOP $$"])
def test_processes_of_a_process_end_with_it(tmp_path: Path, then: str) -> None:
    file, line = tmp_path / "child", line_pair()
    words = ("sh", "-c", FAMILY.format(file=file, then=then))
    with line[0], line[1]:
        order = Order("d0", words, tmp_path, dict(os.environ), line[1].fileno(), tmp_path / "log")
        process = popen(order)
        until(file.exists)
        child = int(file.read_text())
        if then == "true":
            assert process.wait(LIMIT_S) == 0
        else:
            assert is_running(child)
            process.kill()
            assert process.wait(LIMIT_S) == -9
        until(lambda: not is_running(child))
        process.kill()  # nobody is there: its number may be another's
        assert os.getpgid(0) != process.pid


def test_a_wait_for_a_process_ends_in_time(tmp_path: Path) -> None:
    line = line_pair()
    with line[0], line[1]:
        given = dict(os.environ), line[1].fileno(), tmp_path / "log"
        process = popen(Order("d0", ("sleep", "1000"), tmp_path, *given))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert starting.end_now(process)


# --------------------------------------------------------------------------- starting


def test_a_process_is_started_again_where_it_could_not_be_once(tmp_path: Path) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        seen.fail_starts = [OSError(errno.EAGAIN, "no process left")]
        seen.puppets[1].end(-9)
        seen.turn_until(lambda: len(seen.puppets) == 3)


def test_a_run_without_a_new_process_ends_and_says_why(tmp_path: Path) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        seen.fail_starts = [OSError(errno.ENOMEM, "no memory left")] * 10
        seen.puppets[1].end(-9)
        with pytest.raises(FailedError, match=r"killed by signal 9: no process .* no memory left"):
            seen.turn_until(lambda: False)
        assert not seen.puppets[0].process.ended.is_set()


def test_a_run_goes_on_without_a_spare(tmp_path: Path) -> None:
    with stage(tmp_path, spares=1) as seen:
        seen.begin()
        seen.fail_starts = [OSError(errno.EMFILE, "too many open files")] * 10
        seen.supervisor._fill_spares()
        assert len(seen.of("no_spare")) == 1


@pytest.mark.nightly
def test_processes_are_ended_where_their_end_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Puppet] = []
    with stage(tmp_path) as seen:
        seen.begin()
        monkeypatch.setattr(
            "bigbrain_fx.supervisor.crew.end_of", lambda _: os.open(tmp_path / "none", os.O_RDONLY)
        )
        seen.puppets[1].end(-9)
        with pytest.raises(FailedError, match="No such file"):
            seen.turn_until(lambda: False)
        ended += [p for p in seen.puppets[2:] if p.process.ended.is_set()]
        assert len(ended) == 3  # tries


# --------------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = Options("naive", schedule="1f1b", micro_batches=4)
    return split_small(tmp_path_factory.mktemp("failing"), cluster(2), options)


@pytest.mark.nightly
def test_a_folder_of_logs_may_go(bundle: Path, tmp_path: Path) -> None:
    """And come as a file, so that it cannot be made again."""
    plain = supervised(bundle, tmp_path / "plain", ("d0", "d1"), 6)

    def sweep(supervisor: Supervisor) -> None:
        tell, logs = supervisor.told.on_step, supervisor.job.logs

        def hear(step: int, loss: float, step_s: float) -> None:
            assert tell is not None
            tell(step, loss, step_s)
            if step == 1:
                shutil.rmtree(logs)
            if step == 3:
                shutil.rmtree(logs, ignore_errors=True)
                logs.write_text("in the way")

        supervisor.told.on_step = hear

    faults = [Fault("d1", 2, "end"), Fault("d0", 4, "end")]
    seen = supervised(bundle, tmp_path, ("d0", "d1"), 6, faults, on_supervisor=sweep)
    assert (seen.losses, seen.hashes) == (plain.losses, plain.hashes)
    assert [event["device"] for event in seen.of("died")] == ["d1", "d0"]
    assert [event["device"].split(".")[0] for event in seen.of("log_lost")] == ["d0"]


def test_a_process_of_a_run_is_told_its_share_of_the_memory(tmp_path: Path) -> None:
    """As `launch.py` of a bundle tells it."""
    line, environment = line_pair(), {**os.environ, "BIGBRAIN_LOG_SHARERS": "2"}
    with line[0], line[1]:
        words = ("sh", "-c", 'echo "$BIGBRAIN_LOG_BYTES"')
        log = tmp_path / "log"
        order = Order("d0", words, tmp_path, environment, line[1].fileno(), log)
        assert start_supervised(order).wait(LIMIT_S) == 0
    assert int(log.read_text()) > 0


def test_a_host_that_can_start_no_process_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    pair()  # skips where it cannot be made

    def start(_: Order) -> DeviceProcess:
        raise OSError(errno.EAGAIN, "no process left")

    def serve(address: tuple[str, int]) -> None:
        secured = Secured(socket.create_connection(address), pair(), is_head=False)
        Agent(secured, tmp_path, {}, tmp_path, start).run("south")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = threading.Thread(target=serve, args=(listener.getsockname(),))
        agent.start()
        [bridge] = admit(listener, pair(), {"south"}, LIMIT_S).values()
    line = line_pair()
    with line[0], line[1]:
        words, environment = ("python", "train.py"), dict[str, str]()
        given = environment, line[1].fileno(), tmp_path / "log"
        process = bridge.start(Order("d0", words, tmp_path, *given))
        assert process.wait(LIMIT_S) == 71
        process.kill()  # of what is not there
    bridge.close()
    agent.join(LIMIT_S)
    assert not agent.is_alive()


class Fails:
    """A line whose next calls fail, one error each, and then do not."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.sent: list[bytes] = []

    def _strike(self) -> None:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))

    def send(self, packet: bytes) -> None:
        self._strike()
        self.sent.append(packet)

    def recv(self, *_: int) -> bytes:
        self._strike()
        return b'{"say": "warm"}'


def test_no_word_from_another_host_is_lost_for_want_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[dict[str, object]] = []
    bridge = Bridge.__new__(Bridge)
    bridge.mouth = SimpleNamespace(say=said.append)  # type: ignore[assignment]
    bridge.processes = {0: SimpleNamespace(pid=7)}  # type: ignore[dict-item]
    for errors in ([], NO_MEMORY, [errno.EPIPE], [errno.EBADF]):
        line = Fails(*errors)
        bridge.lines = {0: line}  # type: ignore[dict-item]
        bridge._take({"from": 0, "packet": "x"})
        assert line.sent == ([] if errno.EPIPE in errors or errno.EBADF in errors else [b"x"])
    assert not said
    bridge.lines = {0: Fails(errno.EMSGSIZE)}  # type: ignore[dict-item]
    bridge._take({"from": 0, "packet": "x"})
    assert said == [{"kill": 0}]  # who cannot be heard is replaced
    assert "a word of process 7 is lost: [Errno 90] Message too long" in capsys.readouterr().err


@pytest.mark.parametrize("number", NO_MEMORY)
def test_an_agent_hears_later_where_it_cannot_now(number: int) -> None:
    said: list[dict[str, object]] = []
    agent = Agent.__new__(Agent)
    agent.mouth = SimpleNamespace(say=said.append)  # type: ignore[assignment]
    line = Fails(number)
    agent.orders = {0: SimpleNamespace(line=line, pass_on=lambda: None)}  # type: ignore[dict-item]
    agent.remaining = Remaining("south", (), agent.orders)
    agent._hear(0)
    assert not said
    agent._hear(0)
    assert said == [{"from": 0, "packet": '{"say": "warm"}'}]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_to_a_closed_stream_is_lost(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, name, None)  # as Python has it then
    hold_streams()
    with getattr(sys, name) as stream:
        assert not stream.isatty()
        print("nobody reads this", file=stream, flush=True)
