"""Devices that die while others connect, a mesh that is given up, and orders to a process."""

from __future__ import annotations

import array
import errno
import json
import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from bigbrain_fx.runtime import control
from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.control import Control
from bigbrain_fx.runtime.mesh import MeshTransport
from bigbrain_fx.runtime.packets import Meeting
from bigbrain_fx.runtime.peer_states import PeerStates
from bigbrain_fx.runtime.peers import PeerLostError
from bigbrain_fx.runtime.replay import ReplayTransport


class Line:
    """What a device hears of its supervisor: generation 0, and 1 while it connects for 0."""

    peers, lost = True, frozenset[str]()

    def __init__(self) -> None:
        self.generation = 0
        self.on_generation: Any = None
        self.said: list[tuple[str, int]] = []

    def say(self, what: str, **rest: Any) -> None:
        self.said.append((what, rest["generation"]))

    def waiting(self, text: str) -> Line:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_generation(self, above: int) -> int:
        assert self.generation > above
        return self.generation

    def meet(self, generation: int, *told: object) -> Meeting:
        return Meeting(generation, {}, {}, {"d1": 3})


class Connections:
    """Those of one generation."""

    def __init__(self, generation: int) -> None:
        self.generation, self.is_closed = generation, False

    def begin_step(self, expected: object) -> None: ...

    def abandon(self) -> None:
        self.is_closed = True

    close = abandon


class Peers:
    """Has a state to give, and would wait for who takes it."""

    lacks, must_end_step = None, False

    def __init__(self) -> None:
        self.gave: list[int] = []

    def exchange(self, inner: Connections, lacking: object) -> None:
        self.gave.append(inner.generation)


def test_states_are_exchanged_only_in_the_newest_generation() -> None:
    """Whoever left generation 0 sends nothing there: it was waited for for 300 s."""
    line, peers, made = Line(), Peers(), list[Connections]()

    def connect(generation: int) -> MeshTransport:
        made.append(Connections(generation))
        if generation == 0:  # the order comes before the transport is in its place
            line.generation = 1
            line.on_generation()
        return cast(MeshTransport, made[-1])

    transport = ReplayTransport("d0", (), 1, cast(Control, line), connect)
    transport.peers = cast(PeerStates, peers)
    transport.form()
    assert peers.gave == [1]
    assert [each.is_closed for each in made] == [True, False]
    assert line.said == [("formed", 1)]


# ------------------------------------------------------------ a mesh that is given up


def mesh_of(store: Any, rank: int, found: dict[int, Any]) -> None:  # torch exports no names
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has it
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=20)
    found[rank] = dist.ProcessGroupGloo(store, rank, 3, options)


def test_a_wait_for_a_living_peer_is_woken_by_another_peers_death() -> None:
    """The alarm of the dead one, here the next by rank, has failed already: it wakes nobody."""
    store, meshes = dist.HashStore(), dict[int, Any]()  # type: ignore[attr-defined]  # torch has it
    makers = [Thread(target=mesh_of, args=(store, rank, meshes)) for rank in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(30)
    ranks = {f"d{rank}": rank for rank in range(3)}
    channel = Channel(0, "activation", "x", 0, 1, "d0", "d1", (1,), torch.float32)
    ours = MeshTransport(ranks, torch.device("cpu"), 60.0, mesh=meshes[1])
    del meshes[2]  # its connections close
    ours.begin_step(((channel, 1),))
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            ours.recv(channel)
        except PeerLostError as error:
            woken.append(error)

    waiter = Thread(target=wait, daemon=True)
    waiter.start()
    with suppress(RuntimeError):
        ours.alarms[1][1].wait(timedelta(seconds=30))  # until the death is seen
    ours.abandon()
    waiter.join(20)
    assert not waiter.is_alive()
    assert woken


# --------------------------------------------------------------------------- orders


class _LeftError(BaseException):
    """The process would have ended here."""


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, Control]]:
    """The supervisor's end, and a process that is not ended where it would be."""

    def leave() -> None:
        raise _LeftError

    monkeypatch.setattr(control, "_leave", leave)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, Control(theirs, 0.05)


@pytest.mark.parametrize("name", ["select", "recv_fds"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOBUFS])
def test_a_request_is_read_later_where_it_cannot_be_now(
    line: tuple[socket.socket, Control], monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    ours, process = line
    owner, left = (select if name == "select" else socket), [number, number]
    whole = getattr(owner, name)

    def fails(*args: object) -> object:
        if left:
            raise OSError(left.pop(), "no memory")
        return whole(*args)

    monkeypatch.setattr(owner, name, fails)
    ours.send(json.dumps({"do": "epoch", "step": 7}).encode())
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(_LeftError):
        process.listen()
    assert not left
    assert process.epoch == 7


@pytest.mark.parametrize("order", [b"[" * 50_000, b"{}", b'{"do": "nothing"}', b'{"do": "epoch"}'])
def test_an_impossible_request_ends_the_whole_process(
    line: tuple[socket.socket, Control], capsys: pytest.CaptureFixture[str], order: bytes
) -> None:
    line[0].send(order)
    with pytest.raises(_LeftError):
        line[1].listen()
    assert "Error" in capsys.readouterr().err


def test_files_that_the_kernel_cuts_off_are_missed_at_once(
    line: tuple[socket.socket, Control], capsys: pytest.CaptureFixture[str]
) -> None:
    """A process without a descriptor to spare would take an order with fewer files than it says."""
    order = json.dumps({"do": "be", "device": "d0", "slots": [-1, -1]}).encode()
    rights = array.array("i", [os.open(os.devnull, os.O_RDONLY), 2])
    line[0].sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(_LeftError):
            line[1].listen()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(rights[0])
    assert "is cut off" in capsys.readouterr().err
    assert not line[1].duties


def test_a_process_that_is_busy_with_no_instruction_makes_progress(
    line: tuple[socket.socket, Control],
) -> None:
    ours, process = line
    numbers = []
    for busy in (False, True, True):
        process.is_busy = lambda busy=busy: busy  # type: ignore[misc]  # bound here
        process._beat()
        numbers.append(json.loads(ours.recv(1 << 16))["n"])
    assert numbers == [0, 1, 2]
