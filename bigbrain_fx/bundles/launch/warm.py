"""Processes of devices as forks of one that has imported torch, once for all of them.

    launcher ──order──▶ forking ──fork──▶ d0, d1, the spares, replacements of dead ones
       └──────◀ ends (pidfd), exit codes ◀──┘

Importing torch and its optimizers is most of a process's work before its first step. It is also
most of the memory of a small model's process. If the forking process is killed all devices end
with it, and new Pythons replace them. Devices on GPUs are new Pythons from the start.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from bigbrain_fx.processes import PROGRAM
from bigbrain_fx.supervisor import (
    LAUNCHER,
    DeviceProcess,
    Group,
    Order,
    log_limit,
    opened_log,
    popen,
    uncached,
)

IMPORTED = "torch", "torch._dynamo"  # the first step of an optimizer asks for the second
START_S = 120.0  # longest wait for a fork: torch is imported before the first
CODE_S = 10.0
OF_ONE = frozenset({LAUNCHER, "BIGBRAIN_CONTROL", "BIGBRAIN_LOG_BYTES", "BIGBRAIN_LOG_SHARERS"})
"""What the environments of two devices of a run may have otherwise."""


class Warm:
    """Starts the processes of one run; a context manager.

    A process that needs another environment or another host cannot be a fork of the others, and is
    started as a new Python. So is every process after the end of the forking process.
    """

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: Mapping[str, str] = {}

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, order: Order) -> DeviceProcess:
        """Start a process: its line is its stdin."""
        environment = {**uncached(order.folder, order.environment), **log_limit(order.environment)}
        environment[LAUNCHER] = str(os.getpid())
        shared = {name: value for name, value in environment.items() if name not in OF_ONE}
        if self._process is None:
            self._begin(shared)
        if shared != self._shared or order.words[0] != sys.executable:
            return popen(order)
        try:
            return self._forked(order, environment)
        except OSError:
            self._close()
            self._shared = {}
            return popen(order)

    def _begin(self, shared: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), *IMPORTED],
                env=shared,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._line, self._shared = ours, shared

    def _forked(self, order: Order, environment: Mapping[str, str]) -> DeviceProcess:
        if self._line is None:
            raise OSError("the process that forks has ended")
        asked = {
            "words": order.words[1:],
            "folder": str(order.folder),
            "environment": environment,
            "session": True,
        }
        log, no_log = opened_log(order.log)
        with ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(ours.close)
            with theirs, log:
                files = [order.line, log.fileno(), log.fileno(), theirs.fileno()]
                socket.send_fds(self._line, [json.dumps(asked).encode()], files)
            ours.settimeout(START_S)
            pid = ours.recv(32)
            if not pid:
                raise OSError("the process that forks has ended")
            process = ForkedGroup(_Forked(int(pid), ours), no_log)
            on_failure.pop_all()
        return process

    def _close(self) -> None:
        """Let the process that forks end; devices that are left end with it."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CODE_S)
            self._process.kill()
            self._process.wait()


class _Forked:
    """A fork of another process, as `subprocess.Popen` shows a child."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self._line = pid, line
        self._end = os.pidfd_open(pid)
        self._code: int | None = None

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


class ForkedGroup(Group):
    """A fork that leads a group of its own."""

    leader: _Forked

    def _has_ended(self) -> bool:
        return self.leader.has_ended()
