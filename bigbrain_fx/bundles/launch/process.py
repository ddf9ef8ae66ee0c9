"""A device's process: its command, and the state that can be read afterwards.

The module knows neither the devices nor their programs.
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
        """Return its standard output, where that is read."""

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
    """A command for one device: arguments in a folder, with the whole environment.

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

    The folders of the user's modules (PYTHONPATH) go along, from whatever folder; ours do not: a
    bundle needs nothing of ours. The bundle needs its own folder, which PYTHONSAFEPATH would leave
    out.
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

    Processes that it has started therefore end with it. The process ends itself with this process,
    however that ends.
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
