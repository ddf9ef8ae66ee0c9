"""Two supervisors on the loopback: one decides, the other starts what it is told to."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles.launch import start_supervised
from bigbrain_fx.plan import Options
from bigbrain_fx.supervisor import FailedError, Supervisor, admission, hosts
from bigbrain_fx.supervisor.hosts import Agent, Bridge, admit, start_on
from bigbrain_fx.supervisor.secured import (
    Mouth,
    Pair,
    Secured,
    SilentError,
    StrangerError,
)
from bigbrain_fx.supervisor.starving import Starving
from tests.supervisor.test_peer_states import plain, split
from tests.support.bundles import cluster, split_small
from tests.support.certificates import make, pair
from tests.support.replayed import Fault, Seen, supervised

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
        extras=("hosts",),
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    pair()  # skips where it cannot be made
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def call(listener: socket.socket, whose: str = "ours") -> Secured:
    connection = socket.create_connection(listener.getsockname(), LIMIT_S)
    return Secured(connection, pair(whose), is_head=False)


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
    bridges = admit(listener, pair(), {"south"}, LIMIT_S)
    try:
        yield bridges
    finally:
        bridges["south"].close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.nightly
def test_any_host_may_ask_the_run_to_stop(
    bundle: Path, tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM comes to all hosts at a time, or to one: no agent ends before the step does."""
    agents: list[Agent] = []
    serve = Agent.run

    def run(self: Agent, host: str) -> None:
        agents.append(self)
        serve(self, host)

    monkeypatch.setattr(Agent, "run", run)
    (tmp_path / "two").mkdir()
    with agent(listener, tmp_path / "two" / "bundle") as bridges:

        def stop_there(supervisor: Supervisor) -> None:
            bridges["south"].pass_on_stop(supervisor.ask_to_stop)
            supervisor.told.on_step = lambda step, *_: (
                agents[0].ask_to_stop() if step == 2 else None
            )

        seen = supervised(
            bundle,
            tmp_path / "two",
            NAMES,
            100_000,
            start=start_on(bridges, start_supervised),
            hosts=HOSTS,
            on_supervisor=stop_there,
        )
    assert (seen.outcome.stopped_at or 0) >= 3
    assert not seen.of("died")


def over_two_hosts(bundle: Path, folder: Path, listener: socket.socket, *faults: Fault) -> Seen:
    with agent(listener, folder / "bundle") as bridges:
        start = start_on(bridges, start_supervised)
        seen = supervised(bundle, folder, NAMES, STEPS, faults, start=start, hosts=HOSTS)
        told_s = [p.starving.look() for p in bridges["south"].processes.values()]
        assert max(told_s) > 0, told_s
        return seen


class AlwaysStarving(Starving):
    """A process that has had no processor for a millisecond whenever one looks."""

    def look(self) -> float:
        self.total_s += 0.001
        return self.total_s


def test_a_process_on_another_host_is_replaced_there(
    bundle: Path, tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LOOK_S", 0.01)
    monkeypatch.setattr(hosts, "LEAST_STARVED_S", 0.0)
    monkeypatch.setattr(hosts, "Starving", AlwaysStarving)
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
            supervisor.told.on_step = lambda step, *_: (
                bridges["south"].close() if step == 2 else None
            )

        with pytest.raises(
            FailedError, match="its host is lost, and the in-memory checkpoints there"
        ):
            supervised(
                bundle,
                tmp_path / "two",
                NAMES,
                10_000,
                start=start_on(bridges, start_supervised),
                hosts=HOSTS,
                on_supervisor=lose_it,
            )


@pytest.mark.nightly
def test_of_replicas_the_other_hosts_go_on(tmp_path: Path, listener: socket.socket) -> None:
    replicas = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")))
    (tmp_path / "two").mkdir()
    with agent(listener, tmp_path / "two" / "bundle") as bridges:

        def lose_it(supervisor: Supervisor) -> None:
            supervisor.told.on_step = lambda step, *_: (
                bridges["south"].close() if step == 2 else None
            )

        seen = supervised(
            replicas,
            tmp_path / "two",
            ("d0", "d1", "d2", "d3"),
            STEPS,
            start=start_on(bridges, start_supervised),
            hosts=("north", "north", "south", "south"),
            on_supervisor=lose_it,
            every=None,
            elastic=True,
        )
    (gone,) = seen.of("replica_lost")
    assert gone["devices"] == "d2, d3"
    assert "its host is lost" in gone["text"]
    _, expected = plain(replicas, STEPS)
    for name in ("d0", "d1"):
        found = load_file(tmp_path / "two" / "bundle" / "out" / f"{name}.safetensors")
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


@pytest.mark.parametrize("says_so", [True, False])
def test_an_agent_knows_the_end_of_a_run_from_a_lost_supervisor(
    listener: socket.socket, tmp_path: Path, says_so: bool
) -> None:
    """A supervisor that was killed says nothing: the agent must not look like one that is done."""
    ended: list[object] = []

    def serve() -> None:
        try:
            ended.append(Agent(call(listener), tmp_path, {}, tmp_path).run("south"))
        except SilentError as error:
            ended.append(str(error))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    bridge = admit(listener, pair(), {"south"}, LIMIT_S)["south"]
    if not says_so:
        bridge.connection.close()
    bridge.close(3)
    thread.join(LIMIT_S)
    if says_so:
        assert ended == [3]
    else:
        assert str(ended[0]).startswith(
            "its process has ended without a word; nothing was committed"
        )


def test_another_certificate_is_refused(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[BaseException] = []
    known: list[Secured] = []
    told: list[str] = []
    is_told = threading.Event()

    def warn(text: str) -> None:
        told.append(text)
        is_told.set()

    def strangers() -> None:
        for whose in ("another", "ours"):
            try:
                known.append(call(listener, whose))
            except StrangerError as error:
                refused.append(error)
                is_told.wait(LIMIT_S)  # when all are there, nobody waits for who is not
        known[0].say({"host": "south"})

    monkeypatch.setattr(admission, "warn", warn)
    pair("another")
    thread = threading.Thread(target=strangers)
    thread.start()
    bridges = admit(listener, pair(), {"south"}, LIMIT_S)
    thread.join(LIMIT_S)
    bridges["south"].close()
    known[0].dispose()
    assert len(known) == 1
    assert [str(error) for error in refused] == [
        "the other end does not have our certificate (CERTIFICATE_VERIFY_FAILED)"
    ]
    assert "turned away 127.0.0.1" in told[0]


def heads_of(listener: socket.socket, errors: list[StrangerError]) -> Callable[[], None]:
    """Return what lets one agent in, as the first host does."""

    def admit_one() -> None:
        try:
            Secured(listener.accept()[0], pair(), is_head=True, patience_s=5.0).dispose()
        except StrangerError as error:
            errors.append(error)

    return admit_one


@pytest.mark.parametrize("kind", ["no certificate", "another certificate", "text"])
def test_no_agent_comes_in_without_the_certificate(
    listener: socket.socket, tmp_path: Path, kind: str
) -> None:
    """A client that trusts anybody is refused by the head: each end shows its own."""
    errors: list[StrangerError] = []
    thread = threading.Thread(target=heads_of(listener, errors))
    thread.start()
    plain = socket.create_connection(listener.getsockname(), LIMIT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if kind == "another certificate":
        context.load_cert_chain(make(tmp_path / "another"))
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with plain:
        if kind == "text":
            plain.sendall(b'{"host": "south"}\n')
        else:
            with contextlib.suppress(OSError), context.wrap_socket(plain) as wrapped:
                wrapped.sendall(b'{"known": true}\n')
                wrapped.recv(1)
    thread.join(LIMIT_S)
    [error] = errors
    assert str(error).startswith("the other end does not have our certificate")


def test_a_certificate_signed_by_ours_is_refused(listener: socket.socket, tmp_path: Path) -> None:
    """It is the certificate that counts, and not who made it."""
    file = make(tmp_path / "ours")
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=other "
        f"-CA {file} -CAkey {file} -keyout {tmp_path}/theirs -out {tmp_path}/theirs"
    )
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True, timeout=60)
    theirs, ours = Pair(tmp_path / "theirs"), Pair(file)
    theirs.agent.load_verify_locations(file)
    errors: list[StrangerError] = []

    def admit_one() -> None:
        try:
            Secured(listener.accept()[0], ours, is_head=True)
        except StrangerError as error:
            errors.append(error)

    thread = threading.Thread(target=admit_one)
    thread.start()
    connection = socket.create_connection(listener.getsockname(), LIMIT_S)
    with pytest.raises(StrangerError):
        Secured(connection, theirs, is_head=False)
    thread.join(LIMIT_S)
    assert [str(error) for error in errors] == [
        "the other end does not have our certificate (it shows another one)"
    ]


class Meddler:
    """A relay to a port that changes, or repeats, what agents say once they are known."""

    def __init__(self, target: tuple[str, int], change: Callable[[bytes], bytes]) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.target, self.change = target, change
        self.meddles = threading.Event()
        self.seen = bytearray()
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, far = self.server.accept()[0], socket.create_connection(self.target)
        self.ends += [near, far]
        threading.Thread(target=self._carry, args=(far, near), daemon=True).start()
        self._carry(near, far)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                self.seen += some
                target.sendall(self.change(some) if self.meddles.is_set() else some)

    def close(self) -> None:
        for end in (self.server, *self.ends):
            end.close()


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [flipped, lambda data: data + data], ids=["flip", "repeat"])
def test_a_changed_or_repeated_line_is_refused_and_none_can_be_read(
    listener: socket.socket, change: Callable[[bytes], bytes]
) -> None:
    relay, heads = Meddler(listener.getsockname(), change), list[Secured]()
    thread = threading.Thread(
        target=lambda: heads.append(Secured(listener.accept()[0], pair(), is_head=True))
    )
    thread.start()
    ours = Secured(socket.create_connection(relay.server.getsockname()), pair(), is_head=False)
    thread.join(LIMIT_S)
    ours.say({"kill": 1})
    assert heads[0].hear() == {"kill": 1}
    relay.meddles.set()
    ours.say({"kill": 2})
    heard = list[object]()
    with pytest.raises(StrangerError, match="refused, or changed"):
        heard.extend(iter(heads[0].hear, None))
    assert heard in ([], [{"kill": 2}] * (change is not flipped))  # the first of two is ours
    assert b"kill" not in relay.seen
    ours.dispose()
    heads[0].dispose()
    relay.close()


def test_both_ends_speak_and_hear_at_a_time(listener: socket.socket) -> None:
    """Longer lines than a record, and more than sockets hold, in both directions at once."""
    heads: list[Secured] = []
    thread = threading.Thread(
        target=lambda: heads.append(Secured(listener.accept()[0], pair(), is_head=True))
    )
    thread.start()
    agent = call(listener)
    thread.join(LIMIT_S)
    ends = (heads[0], agent)
    heard: dict[int, list[object]] = {0: [], 1: []}

    def hear(which: int) -> None:
        while len(heard[which]) < 60:
            heard[which].append(ends[which].hear())

    listeners = [threading.Thread(target=hear, args=(which,)) for which in (0, 1)]
    for each in listeners:
        each.start()
    mouths = [Mouth(end) for end in ends]
    said = [{"n": number, "text": "x" * (number * 5_000)} for number in range(60)]
    for what in said:
        for mouth in mouths:
            mouth.say(what)
    for each in listeners:
        each.join(LIMIT_S)
    assert heard == {0: said, 1: said}
    for end, mouth in zip(ends, mouths, strict=True):
        end.close()
        mouth.close(LIMIT_S)
        end.dispose()
