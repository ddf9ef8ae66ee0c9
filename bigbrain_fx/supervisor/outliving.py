"""Groups of processes that are to end with this one, also where it can end nothing any more.

A process of its own (`ending_orphans.py`) waits for the end of this one and ends the groups that
were not done with. It is there as long as there is a group, and needs neither torch nor the bundle.
What has left its group, for a session of its own, is nobody's any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PROGRAM = Path(__file__).with_name("ending_orphans.py")
END_S = 5.0  # longest wait for its end


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
            self._tell(f"+{group}\n")

    def drop(self, group: int) -> None:
        """Forget a group that has ended, while its number is nobody else's."""
        with self._lock:
            self._forget_of_parent()
            if group not in self._groups:
                return
            self._groups.remove(group)
            if self._groups:
                self._tell(f"-{group}\n")
            else:
                self._close()

    def _forget_of_parent(self) -> None:
        """Leave to the process that this one is a fork of what is its own."""
        if self._owner != os.getpid():
            self._owner, self._waits = os.getpid(), None
            self._groups.clear()

    def _tell(self, line: str) -> None:
        try:
            if self._waits is None:
                self._start()
            else:
                _write(self._waits, line)
        except OSError:  # it has ended, or is stopped: another one hears of all
            self._end()
            with suppress(OSError):  # no room for a process: there is none then, until the next
                self._start()

    def _start(self) -> None:
        words = (sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()))
        self._waits = subprocess.Popen(
            words,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._waits.stdin is not None
        os.set_blocking(self._waits.stdin.fileno(), False)
        _write(self._waits, "".join(f"+{group}\n" for group in self._groups))

    def _close(self) -> None:
        """Let it end: there is nothing to wait for."""
        if self._waits is not None:
            assert self._waits.stdin is not None
            self._waits.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._waits.wait(END_S)
            self._end()

    def _end(self) -> None:
        if self._waits is not None:
            assert self._waits.stdin is not None
            self._waits.kill()  # before its pipe closes, at which it would end the groups
            self._waits.wait()
            self._waits.stdin.close()
            self._waits = None


def _write(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    os.write(process.stdin.fileno(), text.encode())


OUTLIVING = Outliving()
"""Of this process."""
