"""The parent's side of a process that forks others: it is started once, and asked for each.

    parent ──order──▶ forking ──fork──▶ a process
       └──────◀ its end (pidfd), its exit code ◀──┘

Where the forking process is killed, orders raise OSError.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from bigbrain_fx.processes.forking import Order

PROGRAM = Path(__file__).with_name("forking.py")
IMPORTED = "torch", "torch._dynamo"  # the first step of an optimizer asks for the second
START_S = 120.0  # longest wait for a fork: torch is imported before the first
CODE_S = 10.0


class Forking:
    """A new Python that has imported torch, and nothing of a user's; a context manager.

    Args:
        environment: of that process; an order has its own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with ExitStack() as on_failure, theirs:
            on_failure.callback(self._line.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), *IMPORTED],
                env=environment,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            on_failure.pop_all()

    def __enter__(self) -> Forking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, order: Order, files: Sequence[int]) -> Forked:
        """Start a process.

        Args:
            order: as of `forking.become`.
            files: to be its stdin, stdout and stderr.

        Raises:
            OSError: the forking process has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as on_failure, theirs:
            on_failure.callback(ours.close)
            socket.send_fds(self._line, [json.dumps(order).encode()], [*files, theirs.fileno()])
            on_failure.pop_all()
        return Forked(ours)

    def close(self) -> None:
        """End it; what waits for its end, ends with it."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """A fork of another process, as `subprocess.Popen` shows a child.

    Attributes:
        pid: its id, once it has begun.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._code: int | None = None
        self.pid = self._end = 0

    def begun(self) -> Forked:
        """Wait until it has begun; return itself.

        Raises:
            OSError: the forking process has ended.
        """
        if not self.pid:
            self._line.settimeout(START_S)
            said = self._line.recv(32)
            if not said:
                raise OSError("the process that forks has ended")
            self.pid = int(said)
            self._end = os.pidfd_open(self.pid)
        return self

    def has_ended(self) -> bool:
        """Look whether it has ended; its number is nobody else's until its exit code is asked."""
        return self._code is not None or bool(select.select([self._end], [], [], 0)[0])

    def poll(self) -> int | None:
        """Return its exit code once it has ended; -9 where nobody is left to tell."""
        if self._code is None and self.has_ended():
            self._code = self._asked()
            self._line.close()
            os.close(self._end)
        return self._code

    def _asked(self) -> int:
        self._line.settimeout(CODE_S)
        try:
            self._line.send(b"?")
            return int(self._line.recv(32))
        except (OSError, ValueError):
            return -signal.SIGKILL

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self._code is None and not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """End it."""
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, signal.SIGKILL)

    def leave(self) -> None:
        """End it with its group, if it leads one; it may not have begun."""
        if not self.pid:
            return self._line.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


_AHEAD: list[tuple[dict[str, str], Forking]] = []
"""One that was started before it is needed, and its environment."""


def start_ahead(environment: Mapping[str, str]) -> None:
    """Start one for who takes it next; torch is imported meanwhile."""
    end_ahead()
    _AHEAD.append((dict(environment), Forking(environment)))


def take(environment: Mapping[str, str]) -> Forking:
    """Return the one that was started ahead, if it has this environment; else a new one."""
    if _AHEAD and _AHEAD[0][0] == dict(environment):
        return _AHEAD.pop()[1]
    return Forking(environment)


def ahead() -> Forking | None:
    """Return the one that was started ahead, if there is one; it stays where it is."""
    return _AHEAD[0][1] if _AHEAD else None


def end_ahead() -> None:
    """End the one that was started ahead, if nobody has taken it."""
    while _AHEAD:
        _AHEAD.pop()[1].close()
