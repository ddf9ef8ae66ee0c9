"""Calls made aside: a reader that is slow or gone does not hold a run up.

supervisor ── give ──▶ queue, of a bounded length ──▶ a thread ──▶ terminal, pipe, the caller
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import IO, TypeVar

Told = TypeVar("Told")

ROOM = 10_000  # calls that may wait
LAST_S = 5.0  # longest wait at the end for what has not been told yet


class Aside:
    """Make calls in a thread of its own, in their order; the oldest are dropped where many wait.

    A call that raises OSError is the last one: its terminal or pipe is gone. Any other error is the
    caller's, and comes out of the next `give` or `close`.

    Attributes:
        dropped: how many calls were never made.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.room = room
        self.dropped = 0
        self._changed = threading.Condition()
        self._is_gone = self._is_over = self._is_busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="aside")
        self._thread.start()

    def give(self, call: Callable[[], object]) -> None:
        """Let a call be made soon."""
        self._raise()
        with self._changed:
            if self._is_gone or len(self.waiting) >= self.room:
                self.dropped += 1
            if self._is_gone:
                return
            if len(self.waiting) >= self.room:
                self.waiting.popleft()
            self.waiting.append(call)
            self._changed.notify_all()

    def of(self, call: Callable[[Told], object] | None) -> Callable[[Told], None] | None:
        """Return what makes the same call in the thread; None: there is none to make."""
        return None if call is None else lambda told: self.give(partial(call, told))

    def close(self, wait_s: float = LAST_S) -> None:
        """Wait for what has been given, though not for ever."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_done, wait_s)
            self.dropped += len(self.waiting)
            self.waiting.clear()
        self._raise()

    def _is_done(self) -> bool:
        return self._is_gone or (not self.waiting and not self._is_busy)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.waiting or self._is_over)
                if not self.waiting:
                    return
                call, self._is_busy = self.waiting.popleft(), True
            try:
                call()
            except BaseException as error:
                self._give_up(error)
                return

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._is_gone = True
            self.dropped += 1 + len(self.waiting)
            self.waiting.clear()
            if not isinstance(error, OSError):
                self._error = error
            self._changed.notify_all()


class AsideConsole:
    """Lines to one of this process's streams, written in a thread; those that wait too long go."""

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream, self.aside = stream, Aside()

    def say(self, line: str) -> None:
        """Let a line be written soon."""
        self.aside.give(lambda: _write(self.stream, f"{line}\n"))

    def close(self) -> int:
        """Wait for what was said, though not for ever; return how many lines were not written."""
        self.aside.close()
        return self.aside.dropped


def _write(stream: IO[str] | None, text: str) -> None:
    """Write past Python's own buffer: at its end Python would wait for a reader that is stopped."""
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except (OSError, ValueError):  # no file of the system: a test's, or a notebook's
        stream.write(text)
        stream.flush()
        return
    rest = text.encode(errors="replace")
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # whoever started us has set it so
            select.select([], [fd], [])
