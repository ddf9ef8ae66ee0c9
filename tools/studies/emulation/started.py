"""The two helpers of an emulation as its owner sees them: the relay, and the nursery's processes.

Both programs end when their owner's end of a pipe closes, so they cannot outlive it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bigbrain_fx.core import Link
from bigbrain_fx.errors import InputError

Nics = Mapping[tuple[int, int], Sequence[tuple[str, float]]]
HERE = Path(__file__).resolve().parent
START_S = 120.0  # importing torch on a busy machine
GRACE_S = 5.0


@contextmanager
def watched(folders: Sequence[Path]) -> Iterator[int]:
    """Have a process of its own remove these control groups if this one is killed; give its id."""
    words = [sys.executable, "-I", "-S", str(HERE / "watchdog.py"), str(os.getpid())]
    with subprocess.Popen(
        [*words, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def awake(cpus: Sequence[int]) -> Iterator[list[int]]:
    """Keep these processors from falling asleep: see `awake.py`; give the processes' ids.

    Raises:
        InputError: the kernel does not allow it.
    """
    with ExitStack() as stack:
        started = []
        for cpu in cpus:
            words = [sys.executable, "-I", "-S", str(HERE / "awake.py"), str(cpu)]
            process = stack.enter_context(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise InputError("cannot keep the processors awake: see the lines above")
        yield [process.pid for process in started]


@dataclass(frozen=True)
class Relay:
    """The process that carries the packets; `namespaces` has the path of each device's network."""

    process: subprocess.Popen[bytes]
    namespaces: Sequence[str]

    def lead(self, lead_s: float) -> None:
        """Have every wire deliver so much sooner than described."""
        _tell(self.process, {"lead_s": lead_s})


@contextmanager
def wired(
    devices: int, wires: Sequence[tuple[int, int, Link]], nics: Nics | None = None
) -> Iterator[Relay]:
    """Run the relay.

    Args:
        devices: how many.
        wires: (sender, receiver, link), by number of device.
        nics: (sender, receiver) -> (name, bytes per second) of what its messages share with others.

    Raises:
        InputError: the kernel gives no namespace or interface.
    """
    nics = nics or {}
    rows = [
        (a, b, link.latency_s, link.bytes_per_s, [name for name, _ in nics.get((a, b), ())])
        for a, b, link in wires
    ]
    rates = {name: rate for passed in nics.values() for name, rate in passed}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(HERE / "relay.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        _tell(process, {"devices": devices, "wires": rows, "nics": rates})
        line = process.stdout.readline()
        if not line:
            raise InputError(f"cannot emulate a network: {_last_line(process)}")
        fds = json.loads(line)["namespaces"]
        yield Relay(process, [f"/proc/{process.pid}/fd/{fd}" for fd in fds])
    finally:
        _end(process)


def _tell(process: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _last_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return (process.stderr.read().decode().splitlines() or ["the relay ended"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=GRACE_S)  # closes its stdin: the sign to end
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# --------------------------------------------------------------------------- device processes


@dataclass
class Nursery:
    """The warm process that forks device processes; `rss_bytes` is what each begins with."""

    door: socket.socket
    rss_bytes: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)

    def start(self, order: Mapping[str, Any], stdout: int, stderr: int) -> int:
        """Start one process; return its id."""
        message = json.dumps(order).encode()
        socket.send_fds(self.door, [message], [stdout, stderr])
        until = time.monotonic() + START_S
        while not self.started:
            self.hear(until - time.monotonic())
        return self.started.pop()

    def hear(self, wait_s: float) -> bool:
        """Take one message, if one comes in time.

        Raises:
            RuntimeError: the nursery is gone.
        """
        ready, _, _ = select.select([self.door], (), (), max(0.0, wait_s))
        if not ready:
            return False
        text = self.door.recv(4096)
        if not text:
            raise RuntimeError("the process that starts the devices' processes is gone")
        message = json.loads(text)
        if message["event"] == "ready":
            self.rss_bytes = message["rss_bytes"]
        elif message["event"] == "started":
            self.started.append(message["pid"])
        else:
            self.ended[message["pid"]] = message["code"]
        return True


@contextmanager
def nursed() -> Iterator[Nursery]:
    """Run the nursery; it is ready when this returns."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "nursery.py"), str(theirs.fileno())],
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    nursery = Nursery(ours)
    try:
        until = time.monotonic() + START_S
        while not nursery.rss_bytes:
            if not nursery.hear(until - time.monotonic()):
                raise InputError("torch could not be imported in time")
        yield nursery
    finally:
        ours.close()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class NursedProcess:
    """A device's process, as `subprocess.Popen` shows it."""

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[str] | None) -> None:
        self.nursery, self.pid, self.stdout = nursery, pid, stdout

    @property
    def returncode(self) -> int | None:
        """Its exit code once it has ended, negative for a signal."""
        return self.nursery.ended.get(self.pid)

    def poll(self) -> int | None:
        """Look whether it has ended; return its exit code."""
        while self.nursery.hear(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it still runs.
        """
        until = time.monotonic() + (3600.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.nursery.hear(left_s)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(15)

    def kill(self) -> None:
        """End it."""
        self._signal(9)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
