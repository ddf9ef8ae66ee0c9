"""The thread that hears a process's orders: what the kernel refuses once, and what it cuts off."""

from __future__ import annotations

import array
import errno
import json
import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest

from bigbrain_fx.runtime import control
from bigbrain_fx.runtime.control import Control


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
