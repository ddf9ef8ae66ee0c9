"""A device's process: what is started, and what can be asked of it afterwards.

Which devices there are, and what their programs compute, it does not know.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol


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


Spawn = Callable[[Command], Process]
"""How a device's process is started: here as a child of ours; tools start it in other places."""


def popen(command: Command) -> Process:
    """Start a process as a child of this one."""
    with command.log.open("w") as log:
        return subprocess.Popen(
            command.words,
            cwd=command.folder,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if command.reports else log,
            stderr=log,
            text=True,
        )
