"""Processes of devices and spares: what starts one, what is known of it, how its end is seen."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .hanging import Pulse
from .interval import available_bytes
from .line import Orders

CONTROL = "BIGBRAIN_CONTROL"  # in a process's environment: the descriptor of its line
ADDRESS = "BIGBRAIN_ADDRESS"  # and the address at which other hosts reach it
LOG_BYTES = "BIGBRAIN_LOG_BYTES"  # the most that it keeps of sent messages; or else
LOG_SHARERS = "BIGBRAIN_LOG_SHARERS"  # among how many devices its host's free memory is divided
END_S = 10.0  # longest wait for a process that was killed


class Process(Protocol):
    """A started process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int:
        """Its id."""

    def poll(self) -> int | None:
        """Look whether it has ended; return its exit code, negative for a signal."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Order:
    """What to start: words in a folder, with the whole environment.

    Attributes:
        name: a device's, or a spare's.
        line: the descriptor of the process's end of its line, to be its stdin.
        log: takes what it writes.
        host: where; "" is this one.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    line: int
    log: Path
    host: str = ""


Start = Callable[[Order], Process]


def popen(given: Order) -> Process:
    """Start a process as a child of this one."""
    with given.log.open("w") as log:
        return subprocess.Popen(
            given.words,
            cwd=given.folder,
            env={**given.environment, **log_limit(given.environment)},
            stdin=given.line,
            stdout=log,
            stderr=log,
        )


def log_limit(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process may keep of sent messages, where only the number of sharers is said.

    Half of what is free is for all of them, on the host that starts the process: this one.
    """
    sharers = environment.get(LOG_SHARERS)
    return {} if sharers is None else {LOG_BYTES: str(available_bytes() // (2 * int(sharers)))}


@dataclass
class Member:
    """One process and what it has told.

    Attributes:
        name: of the log; a spare keeps it when it becomes a device.
        since: when it was started, or became a device.
        greeted: it has imported its program.
        device: what it is; None for a spare.
        ready: for which generation it has said what it waits for, and what that is.
        formed: the newest generation in which it was connected.
        step, done: the step that it was last in, and the last one that it has finished.
        failure: the error that it told, and its exit code.
        recalled: it was ended so that all devices start again.
        knows: the orders that it takes, of those that older bundles do not.
    """

    name: str
    process: Process
    line: socket.socket
    log: Path
    pulse: Pulse
    since: float
    orders: Orders
    host: str = ""
    greeted: bool = False
    device: str | None = None
    rank: int = -1
    is_warm: bool = False
    ready: tuple[int, Mapping[str, Any]] = field(default_factory=lambda: (-1, {}))
    formed: int = -1
    step: int = -1
    done: int = -1
    finished: bool = False
    failure: tuple[str, int] | None = None
    warned: int = -1
    recalled: bool = False
    knows: frozenset[str] = frozenset()

    def kill(self) -> None:
        """End it, also while it is stopped."""
        with suppress(ProcessLookupError):
            self.process.kill()


def end_of(process: Process) -> int:
    """Return a descriptor that can be read once the process has ended (Linux)."""
    end = getattr(process, "end", None)
    return os.dup(end) if isinstance(end, int) else os.pidfd_open(process.pid)


def end_now(process: Process) -> None:
    """End a process and wait for it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(END_S)
