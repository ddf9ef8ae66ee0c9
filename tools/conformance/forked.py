"""Start a bundle's processes by forking this one, which has imported torch: seconds less a run.

They are real processes that run the bundle's own train.py under their own environment and meet over
gloo. They inherit our imports, so this does not show that a bundle needs nothing of ours; the
promise tests do. Call it from a process that has not used threads of torch yet.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, NoReturn

from bigbrain_fx.bundles.launch import Command
from bigbrain_fx.processes import become

POLL_S = 0.02


class Forked:
    """A forked process, as `subprocess.Popen` shows it."""

    def __init__(self, pid: int, stdout: IO[str] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it still runs.
        """
        until = time.monotonic() + (3600.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(command: Command, before: Callable[[Command], None] | None = None) -> Forked:
    """Start a device's process as a copy of this one: a `Spawn` of `bigbrain_fx.bundles.launch`.

    `before` is called in the new process, in the bundle's folder.
    """
    reader, writer = os.pipe() if command.reports else (None, None)
    log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    files = [os.open(os.devnull, os.O_RDONLY), log if writer is None else writer, log]
    pid = os.fork()
    if pid == 0:
        _become(command, files, before)
    for file in {*files}:
        os.close(file)
    return Forked(pid, os.fdopen(reader) if reader is not None else None)


def _become(
    command: Command, files: list[int], before: Callable[[Command], None] | None
) -> NoReturn:
    """Be the process; what this one was to do at its end is not the new one's to do."""
    order = {
        "words": command.words[1:],
        "folder": str(command.folder),
        "environment": command.environment,
    }

    def prepare() -> None:
        atexit._clear()
        sys.path.insert(0, str(command.folder.resolve()))
        if before is not None:
            before(command)

    become(order, files, prepare)
