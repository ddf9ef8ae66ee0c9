"""Hosts that fall silent, and strangers at the port: nobody waits for them for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import start_supervised
from bigbrain_fx.plan import Options
from bigbrain_fx.supervisor import DeviceProcess, FailedError, Supervisor, watch
from bigbrain_fx.supervisor.admission import Door
from bigbrain_fx.supervisor.hosts import Agent, Bridge, admit, start_on
from bigbrain_fx.supervisor.secured import Mouth, Secured, SilentError, StrangerError
from tests.support.bundles import cluster, is_running, split_small
from tests.support.certificates import pair
from tests.support.puppets import stage
from tests.support.replayed import supervised

LIMIT_S = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    pair()  # skips where it cannot be made
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Wire:
    """A relay to a port; once it is cut nothing comes through, and neither end is told."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.server = socket.create_server(("127.0.0.1", 0))
        self.is_cut = threading.Event()
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            near = self.server.accept()[0]
            far = socket.create_connection(self.target)
            self.ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (some := source.recv(1 << 16)) and not self.is_cut.is_set():
                target.sendall(some)

    def close(self) -> None:
        for end in (self.server, *self.ends):
            end.close()


@pytest.fixture
def wire(listener: socket.socket) -> Iterator[Wire]:
    made = Wire(listener.getsockname())
    yield made
    made.close()


def both_ends(listener: socket.socket, port: tuple[str, int]) -> tuple[Secured, Secured]:
    """Return the head's end and the agent's of a connection."""
    heads: list[Secured] = []

    def answer() -> None:
        heads.append(Secured(listener.accept()[0], pair(), is_head=True))

    thread = threading.Thread(target=answer)
    thread.start()
    agent = Secured(socket.create_connection(port), pair(), is_head=False)
    thread.join(LIMIT_S)
    return heads[0], agent


@pytest.mark.nightly
def test_both_ends_notice_a_cut_wire(listener: socket.socket, wire: Wire) -> None:
    ends = both_ends(listener, wire.server.getsockname())
    for end in ends:
        end.allow_silence(1.0)
    mouths = [Mouth(end) for end in ends]
    mouths[0].say({"kill": 1})
    assert ends[1].hear() == {"kill": 1}
    start = time.monotonic()
    threading.Timer(1.5, wire.is_cut.set).start()  # beats are no silence
    for end in ends:
        with pytest.raises(SilentError, match="nothing was heard of it for 1 s"):
            end.hear()
    assert 2.0 < time.monotonic() - start < 10.0
    for end, mouth in zip(ends, mouths, strict=True):
        end.close()
        mouth.close(LIMIT_S)
        end.dispose()


@pytest.mark.nightly
def test_a_silent_host_ends_the_run_on_both_sides(
    listener: socket.socket, wire: Wire, tmp_path: Path
) -> None:
    """The processes of the other host are there, and train on; only their supervisor is unheard."""
    devices = cluster(2, ("north", "south"))
    bundle = split_small(tmp_path, devices, Options("naive", schedule="1f1b", micro_batches=4))
    folder, errors, pids = tmp_path / "two", list[BaseException](), list[int]()
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def start(order: object) -> DeviceProcess:
        process = start_supervised(order)  # type: ignore[arg-type]
        pids.append(process.pid)
        return process

    def serve() -> None:
        connection = socket.create_connection(wire.server.getsockname(), LIMIT_S)
        secured = Secured(connection, pair(), is_head=False)
        one = {**environment, "OMP_NUM_THREADS": "1"}
        try:
            Agent(secured, folder / "bundle", one, tmp_path, start).run("south")
        except SilentError as error:
            errors.append(error)

    agent = threading.Thread(target=serve, daemon=True)
    agent.start()
    hang_s, at = 3.0, list[float]()
    bridges: dict[str, Bridge] = admit(listener, pair(), {"south"}, LIMIT_S, hang_s)

    def cut(supervisor: Supervisor) -> None:
        def hear(step: int, loss: float, step_s: float) -> None:
            if step == 2:
                wire.is_cut.set()
                at.append(time.monotonic())

        supervisor.told.on_step = hear

    with pytest.raises(FailedError, match="its host is lost, and the in-memory checkpoints there"):
        supervised(
            bundle,
            folder,
            ("d0", "d1"),
            100_000,
            start=start_on(bridges, start),
            on_supervisor=cut,
            hosts=("north", "south"),
            hang_s=hang_s,
        )
    assert time.monotonic() - at[0] < hang_s + 5.0
    bridges["south"].close()
    agent.join(LIMIT_S)
    assert not agent.is_alive()
    assert [type(error) for error in errors] == [SilentError]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_death_that_does_not_come_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "END_S", 0.3)
    with stage(tmp_path) as seen:
        seen.begin()
        stuck = seen.puppets[1]
        stuck.process.kill = lambda: None  # type: ignore[method-assign]
        stuck.say("beat", n=1, step=3, waiting=None)  # it computes, for ever
        stuck.is_silent = True
        with pytest.raises(FailedError, match=r"0\.3 s after it was ended it is still there"):
            seen.turn_until(lambda: False)
        assert [event["device"] for event in seen.of("hang")] == ["d1"]


# --------------------------------------------------------------------------- strangers


def test_a_stranger_who_takes_its_time_holds_up_nobody(listener: socket.socket) -> None:
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.05):
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"x")

    known: list[Secured] = []

    def come() -> None:
        connection = socket.create_connection(listener.getsockname())
        known.append(Secured(connection, pair(), is_head=False))
        known[0].say({"host": "south"})

    threads = [threading.Thread(target=trickle), threading.Thread(target=come)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    bridges = admit(listener, pair(), {"south"}, LIMIT_S)
    assert time.monotonic() - start < 5.0
    over.set()
    for thread in threads:
        thread.join(LIMIT_S)
    bridges["south"].close()
    known[0].dispose()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_has_one_deadline_for_all_it_sends(listener: socket.socket) -> None:
    stranger = socket.create_connection(listener.getsockname())
    over = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                stranger.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    start = time.monotonic()
    with pytest.raises(StrangerError):
        Secured(listener.accept()[0], pair(), is_head=True, patience_s=0.5)
    assert time.monotonic() - start < 5.0
    over.set()
    thread.join(LIMIT_S)
    stranger.close()


def test_more_strangers_than_there_is_room_for(listener: socket.socket) -> None:
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(100)]
    known: list[Secured] = []

    def come() -> None:
        connection = socket.create_connection(listener.getsockname())
        known.append(Secured(connection, pair(), is_head=False))
        known[0].say({"host": "south"})

    thread = threading.Thread(target=come)
    thread.start()
    bridges = admit(listener, pair(), {"south"}, LIMIT_S)
    thread.join(LIMIT_S)
    bridges["south"].close()
    known[0].dispose()
    for stranger in strangers:
        stranger.close()


def test_a_caller_for_whom_there_is_no_thread_is_turned_away_alone(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    door = Door(listener, pair())
    with socket.create_connection(listener.getsockname()) as caller, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        door._open()
        caller.settimeout(LIMIT_S)
        assert caller.recv(1) == b""
    assert not door.here
    assert "ulimit -u" in capsys.readouterr().err


def test_nested_or_endless_lines_are_refused(listener: socket.socket) -> None:
    for text in (b"[" * 50_000, b"[1]", b"x" * (5 << 20)):
        head, agent = both_ends(listener, listener.getsockname())
        end = b"\n" if len(text) < 1 << 20 else b""

        def send(agent: Secured = agent, line: bytes = text + end) -> None:
            with contextlib.suppress(OSError):
                agent._tls.write(line)
                agent.connection.sendall(agent._out.read())

        thread = threading.Thread(target=send)
        thread.start()
        with pytest.raises(StrangerError, match="a message is"):
            head.hear()
        head.dispose()
        thread.join(LIMIT_S)
        agent.dispose()
