"""Groups of processes that are to end with this one, also where it can end nothing any more.

    python -I -S outliving.py PID GROUP ...

is a process of its own, a child of PID: it waits for PID's end, and then ends the groups. Another
such process takes its place where a group comes or goes. The program needs neither torch nor the
bundle. A process that has left its group, for a session of its own, is not ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

LOOK_S = 0.1


class Outliving:
    """The groups, by the ids of their leaders; threads may share one."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._waits: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.RLock()

    def add(self, group: int) -> None:
        """Let a group end with this process."""
        with self._lock:
            self._forget_of_parent()
            self._groups.add(group)
            self._replace()

    def drop(self, group: int) -> None:
        """Forget a group that has ended, while its number is nobody else's."""
        with self._lock:
            self._forget_of_parent()
            if group in self._groups:
                self._groups.remove(group)
                self._replace()

    def _forget_of_parent(self) -> None:
        """Leave to the process that this one is a fork of what is its own."""
        if self._owner != os.getpid():
            self._owner, self._waits = os.getpid(), None
            self._groups.clear()

    def _replace(self) -> None:
        """Let a process wait that knows these groups, if there are any, in place of the last."""
        before, self._waits = self._waits, None
        if self._groups:
            words = (sys.executable, "-I", "-S", __file__, str(os.getpid()))
            with suppress(OSError):  # no room for a process: there is none then, until the next
                self._waits = subprocess.Popen(
                    (*words, *map(str, self._groups)),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        if before is not None:
            before.kill()
            before.wait()


OUTLIVING = Outliving()
"""Of this process."""


def main(parent: int, groups: list[int]) -> None:
    """Wait until the parent has ended; then end what is left."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)  # whatever ends the parent must not end this first
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(group) for group in sys.argv[2:]])
