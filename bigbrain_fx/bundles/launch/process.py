"""A device's process: what is started, and what can be asked of it afterwards.

Which devices there are, and what their programs compute, it does not know.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from bigbrain_fx.supervisor import LAUNCHER, Group, uncached


class Process(Protocol):
    """A started process of a device, as `subprocess.Popen` shows it."""

    @property
    def stdout(self) -> IO[str] | None:
        """What it prints, where that is read."""

    @property
    def returncode(self) -> int | None:
        """Its exit code once it has ended, negative for a signal."""

    def poll(self) -> int | None:
        """Look whether it has ended; return its exit code."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Command:
    """What to start for one device: words in a folder, with the whole environment.

    Attributes:
        log: takes what it writes to stderr, and to stdout unless `reports`.
        reports: its stdout is read by us.
    """

    device: str
    words: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    log: Path
    reports: bool


_PACKAGES = Path(__file__).resolve().parents[3]


def users_environment(*left_out: str) -> dict[str, str]:
    """Return this process's environment for one of a bundle.

    Where the user's modules are found (PYTHONPATH) goes along, from whatever folder; where ours are
    does not: a bundle needs nothing of ours. It needs its own folder, which PYTHONSAFEPATH would
    leave out.
    """
    left_out = (*left_out, "PYTHONSAFEPATH")
    found = {name: value for name, value in os.environ.items() if name not in left_out}
    given = filter(None, found.pop("PYTHONPATH", "").split(os.pathsep))
    paths = [os.path.abspath(path) for path in given if Path(path).resolve() != _PACKAGES]
    return {**found, "PYTHONPATH": os.pathsep.join(paths)} if paths else found


Spawn = Callable[[Command], Process]
"""How a device's process is started: here as a child of ours; tools start it in other places."""


def popen(command: Command) -> Process:
    """Start a process as a child of this one; it leads a session, and a group, of its own.

    So what it has started ends with it. It ends itself with this process, however that ends.
    """
    environment = uncached(command.folder, command.environment)
    with command.log.open("w") as log:
        leader = subprocess.Popen(
            command.words,
            cwd=command.folder,
            env={**environment, LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if command.reports else log,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    return _Child(leader)


class _Child(Group):
    """A child of ours with what it has started, as `subprocess.Popen` shows one."""

    def __init__(self, leader: subprocess.Popen[str]) -> None:
        super().__init__(leader)
        self.stdout = leader.stdout
        self._terminate = leader.terminate

    @property
    def returncode(self) -> int | None:
        """Its exit code, once somebody has looked for its end."""
        return self.code

    def terminate(self) -> None:
        """Ask it to end."""
        self._terminate()
