"""Processes of devices and spares: what starts one, what is known of it, how its end is seen.

While this process is stopped (Ctrl-Z, SIGSTOP) or starved it receives nothing, so no deadline may
have passed: see `AwakeClock`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from .pipe import Ears, Orders
from .policies import IS_WATCHED
from .protocol import LastWord

if TYPE_CHECKING:
    from .outliving import Outliving


LEAST_GAP_S = 0.5


class AwakeClock:
    """Tell the time on a monotonic clock, in seconds; callers must read it at an even pace.

    Args:
        pace_s: the longest time from one look to the next. Where two are much further apart, this
            process did not run in between, and only `pace_s` of that counts.
    """

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.most_s = max(2 * pace_s, LEAST_GAP_S)
        self.looked = time.monotonic()
        self.left_out_s = 0.0

    def now(self) -> float:
        """Return the time; signal handlers may call this."""
        looked, self.looked = self.looked, time.monotonic()
        gap_s = self.looked - looked
        if gap_s > self.most_s:
            self.left_out_s += gap_s - self.pace_s
        return self.looked - self.left_out_s


CALLED_IN = (
    "BIGBRAIN_CALLED_IN"  # where the user called it: paths of the command line are from there
)
LAUNCHER = "BIGBRAIN_LAUNCHER"  # in a process's environment: whom it ends with
CONTROL = "BIGBRAIN_CONTROL"  # and the descriptor of its line
ADDRESS = "BIGBRAIN_ADDRESS"  # and the address at which other hosts reach it
LOG_BYTES = "BIGBRAIN_LOG_BYTES"  # the most that it keeps of sent messages; or else
LOG_SHARERS = "BIGBRAIN_LOG_SHARERS"  # among how many devices its host's free memory is divided
TUNABLES = "GLIBC_TUNABLES"
UNCACHED = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"  # no small freed block is kept
STORES_ACTIVATIONS = Path("runtime", "stored_activations.py")  # a bundle has it that does
END_S = 10.0  # longest wait for a process that was killed
LOOK_S = 0.005


class DeviceProcess(Protocol):
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
        """End it, and what it has started."""


@dataclass(frozen=True)
class Order:
    """A process to start: words in a folder, with the whole environment.

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


Start = Callable[[Order], DeviceProcess]


def popen(given: Order, popen: Callable[..., DeviceProcess] = subprocess.Popen) -> DeviceProcess:
    """Start a process as a child of this one; it leads a session, and a group, of its own.

    Only this process then handles Ctrl-C in a terminal.
    """
    environment = {
        **uncached(given.folder, given.environment),
        **log_limit(given.environment),
        LAUNCHER: str(os.getpid()),
    }
    log, no_log = opened_log(given.log)
    with log:
        leader = popen(
            given.words,
            cwd=given.folder,
            env=environment,
            stdin=given.line,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Group(leader, no_log)


def opened_log(path: Path) -> tuple[IO[str], str | None]:
    """Open a log to write, in a folder that may be gone; where it cannot be, nothing is kept.

    Returns:
        The file, and why it is not the one that was asked for.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8"), None
    except OSError as error:
        return open(os.devnull, "w", encoding="utf-8"), str(error)


class Group:
    """A process that leads a group of its own, as `subprocess.Popen` shows it.

    When the process ends, or is ended, all processes of its group end, too: all that it has
    started. With `outliving` they also end when this process is killed.

    Args:
        leader: the process; nobody else waits for it.
        no_log: why its log is not kept; None: it is.
        outliving: knows what is to end with this process.
    """

    def __init__(
        self,
        leader: DeviceProcess,
        no_log: str | None = None,
        outliving: Outliving | None = None,
    ) -> None:
        self.leader = leader
        self.outliving = outliving or _outliving()
        self.pid = leader.pid
        self.no_log = no_log
        self.code: int | None = None
        if self.outliving is not None:
            self.outliving.add(self.pid)

    def poll(self) -> int | None:
        """Look whether it has ended; return its exit code, negative for a signal."""
        if self.code is None and self._has_ended():
            self._end_group()  # its number is nobody else's until it is waited for
            if self.outliving is not None:
                self.outliving.drop(self.pid)
            self.code = self.leader.poll()
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:  # this needs no file, of which there may be none left
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def kill(self) -> None:
        """End it and its group, also while they are stopped."""
        if self.poll() is None and not self._end_group():
            self.leader.kill()

    def _has_ended(self) -> bool:
        """Look without taking the exit code, which would set its number free."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _end_group(self) -> bool:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _outliving() -> Outliving | None:
    """Return what knows of groups that are to end with this process; None: nothing does."""
    if not IS_WATCHED:
        return None
    from .outliving import OUTLIVING  # only bundles of --with watch have it

    return OUTLIVING


def log_limit(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process may keep of sent messages, where only the number of sharers is said.

    Half of what is free is for all of them, on the host that starts the process: this one.
    """
    sharers = environment.get(LOG_SHARERS)
    if sharers is None:
        return {}
    from .host_memory import available_bytes  # only bundles of --with watch have it

    return {LOG_BYTES: str(available_bytes() // (2 * int(sharers)))}


def uncached(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a process's environment; where activations are offloaded, malloc caches nothing small.

    Small blocks in a cache lie between large ones that have gone, and nobody can use the memory
    there. The user's own settings of these variables stand.
    """
    given = environment.get(TUNABLES, "")
    if "tcache_count" in given or not (folder / STORES_ACTIVATIONS).exists():
        return dict(environment)
    return {**environment, TUNABLES: ":".join(filter(None, (given, UNCACHED)))}


@dataclass(eq=False)
class Member:
    """One process and what it has reported.

    Attributes:
        name: of the log; a spare keeps it when it becomes a device.
        heard: when it last said anything: a stopped process says nothing.
        since: when it was started, or became a device.
        greeted: it has imported its program.
        device: what it is; None for a spare.
        ready: for which generation it has said what it waits for, and what that is.
        lacks: the step whose beginning it has to take from its peers; None: it has its state.
        formed: the newest generation in which it was connected.
        step, done: the step that it was last in, and the last one that it has finished.
        began: the step that it was to begin with.
        failure: the error that it reported.
        recalled: it was ended so that all devices start again.
        ended_at: when it was ended here because it hung, on a monotonic clock; None: it was not.
        knows: the orders that it takes, of those that older bundles do not.
        replicas: the devices of each, where a run can go on without one of them.
    """

    name: str
    process: DeviceProcess
    line: socket.socket
    log: Path
    heard: float
    since: float
    orders: Orders
    ears: Ears
    host: str = ""
    greeted: bool = False
    device: str | None = None
    rank: int = -1
    is_warm: bool = False
    ready: tuple[int, Mapping[str, Any]] = field(default_factory=lambda: (-1, {}))
    lacks: int | None = None
    formed: int = -1
    step: int = -1
    began: int = 0
    done: int = -1
    finished: bool = False
    failure: LastWord | None = None
    recalled: bool = False
    ended_at: float | None = None
    knows: frozenset[str] = frozenset()
    replicas: list[list[str]] = field(default_factory=list)

    def kill(self) -> None:
        """End it, and what it has started, also while they are stopped."""
        with suppress(ProcessLookupError):
            self.process.kill()


def end_of(process: DeviceProcess) -> int:
    """Return a descriptor that can be read once the process has ended (Linux)."""
    end = getattr(process, "end", None)
    return os.dup(end) if isinstance(end, int) else os.pidfd_open(process.pid)


def end_now(process: DeviceProcess) -> bool:
    """End a process and wait for it; return whether it has ended: the kernel may not let it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return process.poll() is not None
