"""A process on another host, as one of this host is seen: it has an end, and can be ended."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

from .pulse import ToldStarving


class RemoteProcess:
    """A process behind a bridge, as `subprocess.Popen` shows one."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid = -1
        self.code: int | None = None
        self.is_lost = False  # with its host
        self.starving = ToldStarving()
        self.ended = threading.Event()
        self.end, self._end = os.pipe()  # readable once it has ended
        self._kill = kill

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self.ended.wait(timeout) or self.code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.code

    def kill(self) -> None:
        """End it."""
        self._kill()

    def dispose(self) -> None:
        """Give the pipe back."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def has_ended(self, code: int) -> None:
        """Take note of its end."""
        if self.code is None:
            self.code = code
            os.close(self._end)
            self.ended.set()
