"""Two supervisors on the loopback: one decides, the other starts what it is told to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbrain_fx.launch import start_supervised
from bigbrain_fx.plan import Options
from bigbrain_fx.supervisor import FailedError, Supervisor
from bigbrain_fx.supervisor.hosts import Agent, Bridge, admit, start_on
from bigbrain_fx.supervisor.secured import Secured, StrangerError, read_secret
from tests.bundles import cluster, split_small
from tests.replayed import Fault, Seen, supervised

SECRET = b"sixteen letters or more"
HOSTS = ("north", "south", "north")
NAMES = ("d0", "d1", "d2")
STEPS = 5
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(
        tmp_path_factory.mktemp("hosts"),
        cluster(3, ("north", "south")),
        Options("naive", schedule="1f1b", micro_batches=4),
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def call(listener: socket.socket, secret: bytes = SECRET) -> Secured:
    connection = socket.create_connection(listener.getsockname(), LIMIT_S)
    return Secured(connection, secret, is_head=False)


@contextlib.contextmanager
def agent(listener: socket.socket, folder: Path) -> Iterator[dict[str, Bridge]]:
    """The agent of the host south, for the bundle that will be in `folder`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    logs = folder.parent

    def serve() -> None:
        Agent(call(listener), folder, environment, logs, start_supervised).run("south")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    bridges = admit(listener, SECRET, {"south"}, LIMIT_S)
    try:
        yield bridges
    finally:
        bridges["south"].close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def over_two_hosts(bundle: Path, folder: Path, listener: socket.socket, *faults: Fault) -> Seen:
    with agent(listener, folder / "bundle") as bridges:
        start = start_on(bridges, start_supervised)
        return supervised(bundle, folder, NAMES, STEPS, faults, start=start, hosts=HOSTS)


def test_a_process_on_another_host_is_replaced_there(
    bundle: Path, tmp_path: Path, listener: socket.socket
) -> None:
    plain = supervised(bundle, tmp_path / "plain", NAMES, STEPS)
    faults = Fault("d1", 3, 6), Fault("d2", 4, 2)
    seen = over_two_hosts(bundle, tmp_path / "two", listener, *faults)
    assert [event["device"] for event in seen.of("died")] == ["d1", "d2"], repr(seen.of("died"))
    assert seen.of("assigned")[0]["step"] == 2  # from a snapshot that lies there
    assert (seen.losses, seen.hashes) == (plain.losses, plain.hashes)


def test_a_lost_host_ends_the_run(bundle: Path, tmp_path: Path, listener: socket.socket) -> None:
    (tmp_path / "two").mkdir()
    with agent(listener, tmp_path / "two" / "bundle") as bridges:

        def lose_it(supervisor: Supervisor) -> None:
            supervisor.on_step = lambda step, *_: bridges["south"].close() if step == 2 else None

        with pytest.raises(FailedError, match="its host is lost, and the snapshots there"):
            supervised(
                bundle,
                tmp_path / "two",
                NAMES,
                10_000,
                start=start_on(bridges, start_supervised),
                hosts=HOSTS,
                on_supervisor=lose_it,
            )


def test_who_does_not_know_the_secret_is_turned_away(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    refused: list[BaseException] = []
    known: list[Secured] = []

    def stranger() -> None:
        try:
            call(listener, b"another secret, as long")
        except StrangerError as error:
            refused.append(error)
        known.append(call(listener))
        known[0].say({"host": "south"})

    thread = threading.Thread(target=stranger)
    thread.start()
    bridges = admit(listener, SECRET, {"south"}, LIMIT_S)
    thread.join(LIMIT_S)
    bridges["south"].close()
    known[0].dispose()
    assert [str(error) for error in refused] == ["the other end does not know the secret"]
    assert "turned away 127.0.0.1" in capsys.readouterr().err


def test_a_changed_or_repeated_line_is_refused(listener: socket.socket) -> None:
    heads: list[Secured] = []
    thread = threading.Thread(
        target=lambda: heads.append(Secured(listener.accept()[0], SECRET, is_head=True))
    )
    thread.start()
    ours = call(listener)
    thread.join(LIMIT_S)
    ours.say({"kill": 1})
    assert heads[0].hear() == {"kill": 1}
    mark = ours._mark(ours.own, ours.sent, b'{"kill": 1}').encode()
    ours.connection.sendall(mark + b' {"kill": 2}\n')
    with pytest.raises(StrangerError, match="mark of the other end"):
        heads[0].hear()
    ours.sent -= 1  # what was sent before, again
    ours.say({"kill": 1})
    with pytest.raises(StrangerError, match="mark of the other end"):
        heads[0].hear()
    ours.dispose()
    heads[0].dispose()


def test_a_secret_is_its_owners_only(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o644)
    with pytest.raises(StrangerError, match="chmod 600"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    file.write_bytes(b"short")
    with pytest.raises(StrangerError, match="16 characters"):
        read_secret(file)
