"""Groups of processes that are to end with this one, also where it can end nothing any more.

A process of its own (`ending_orphans.py`) waits for the end of this one and ends the groups that
were not done with. It is there as long as there is a group, and needs neither torch nor the bundle.

What has left its group, for a session of its own, is known by a mark in its environment: a random
word that whatever a process starts inherits, unless it is given another environment.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PROGRAM = Path(__file__).with_name("ending_orphans.py")
END_S = 5.0  # longest wait for its end
MARK = "BIGBRAIN_STARTED"  # in the environment: whose process it is, or was started by


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for one process, and for what that will start."""
    return {**environment, MARK: secrets.token_hex(8)}


class Outliving:
    """The groups, by the ids of their leaders; threads may share one."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}  # and the mark of what each has started
        self._waits: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.RLock()

    def add(self, group: int, environment: Mapping[str, str]) -> None:
        """Let a group end with this process; `environment` is its leader's, `marked` or not."""
        with self._lock:
            self._forget_of_parent()
            self._groups[group] = environment.get(MARK, "")
            self._tell(self._about(group))

    def drop(self, group: int) -> None:
        """Forget a group that has ended, while its number is nobody else's.

        What it has started in sessions of their own is ended soon.
        """
        with self._lock:
            self._forget_of_parent()
            if group not in self._groups:
                return
            del self._groups[group]
            if self._groups:
                self._tell(f"-{group}\n")
            else:
                self._close()

    def _forget_of_parent(self) -> None:
        """Leave to the process that this one is a fork of what is its own."""
        if self._owner != os.getpid():
            self._owner, self._waits = os.getpid(), None
            self._groups.clear()

    def _about(self, group: int) -> str:
        return f"+{group} {self._groups[group]}\n"

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
            env={name: text for name, text in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._waits.stdin is not None
        os.set_blocking(self._waits.stdin.fileno(), False)
        _write(self._waits, "".join(map(self._about, self._groups)))

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
