"""Processes of devices as forks of one that has imported torch, once for all of them.

    launcher ──order──▶ forking ──fork──▶ d0, d1, the spares, replacements of dead ones
       └──────◀ ends (pidfd), exit codes ◀──┘

Importing torch and its optimizers is most of a process's work before its first step. It is also
most of the memory of a small model's process. If the forking process is killed all devices end
with it, and new Pythons replace them. Devices on GPUs are new Pythons from the start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from bigbrain_fx.bundles.launch.process import users_environment
from bigbrain_fx.core import Device
from bigbrain_fx.processes import Forked, Forking, end_ahead, start_ahead, take
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

READ_LATER = "OMP_NUM_THREADS", "BIGBRAIN_"
"""How names of variables begin that a fork reads anew: of its threads, and what a run tells it."""


@contextmanager
def started_first(devices: Iterable[Device]) -> Iterator[None]:
    """Start the process that forks devices before their bundle: torch is imported meanwhile."""
    if sys.platform == "linux" and all(device.kind == "cpu" for device in devices):
        given = {**users_environment("RANK", "WORLD_SIZE"), "PYTHONUNBUFFERED": "1"}
        start_ahead(shared(given))
    try:
        yield
    finally:
        end_ahead()


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that the processes of a run must have alike."""
    return {name: text for name, text in environment.items() if not name.startswith(READ_LATER)}


class Warm:
    """Starts the processes of one run; a context manager.

    A process that needs another environment or another host cannot be a fork of the others, and is
    started as a new Python. So is every process after the end of the forking process.
    """

    def __init__(self) -> None:
        self._forking: Forking | None = None
        self._shared: Mapping[str, str] | None = None

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, order: Order) -> DeviceProcess:
        """Start a process: its line is its stdin."""
        environment = {**uncached(order.folder, order.environment), **log_limit(order.environment)}
        environment[LAUNCHER] = str(os.getpid())
        alike = shared(environment)
        if self._shared is None:
            self._forking, self._shared = take(alike), alike
        if alike != self._shared or order.words[0] != sys.executable:
            return popen(order)
        try:
            return self._forked(order, environment)
        except OSError:
            self._close()
            return popen(order)

    def _forked(self, order: Order, environment: Mapping[str, str]) -> DeviceProcess:
        if self._forking is None:
            raise OSError("the process that forks has ended")
        asked = {
            "words": order.words[1:],
            "folder": str(order.folder),
            "environment": environment,
            "session": True,
        }
        log, no_log = opened_log(order.log)
        with log:
            files = [order.line, log.fileno(), log.fileno()]
            forked = self._forking.fork(asked, files).begun()
        return ForkedGroup(forked, no_log)

    def _close(self) -> None:
        """Let the process that forks end; devices that are left end with it."""
        if self._forking is not None:
            self._forking.close()
            self._forking = None


class ForkedGroup(Group):
    """A fork that leads a group of its own."""

    leader: Forked

    def _has_ended(self) -> bool:
        return self.leader.has_ended()
